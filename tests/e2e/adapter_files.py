"""Adapter directories for the tests: variants of a trained one, and ones that must be refused."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from loramux.aio import AsyncClient
from tests.e2e.status_watch import PATIENCE_S

Q_PROJ = "model.layers.{layer}.self_attn.q_proj"
HIDDEN = 576


def write(directory: Path, shapes: Mapping[str, tuple[int, int]], rank: int = 4) -> Path:
    """Save an adapter of random weights for modules of these (in, out) features, as PEFT would."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for module, (in_features, out_features) in shapes.items():
        for factor, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
            key = f"base_model.model.{module}.lora_{factor}.weight"
            tensors[key] = 0.02 * torch.randn(shape, generator=generator)
    save_file(tensors, directory / "adapter_model.safetensors")
    targets = sorted({module.rpartition(".")[2] for module in shapes})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def another_revision(source: Path, directory: Path) -> Path:
    """The same adapter under another digest: a key that changes nothing has another value."""
    shutil.copytree(source, directory)
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"revision": str(directory)}))
    return directory


async def publish(client: AsyncClient, directory: Path, adapter_id: str) -> str:
    """Push `directory` and wait until the gateway knows; the revision."""
    revision = (await client.adapters.push(directory, adapter_id)).revision.ref.revision

    async def known() -> bool:
        models = await client.models()
        return any(adapter.newest_revision == revision for adapter in models.adapters)

    await until(known)
    return revision


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Until `await condition()` holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110 -- what other processes do sets no event here
            await asyncio.sleep(0.05)
