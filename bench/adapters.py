"""Random adapters in PEFT's format, written without torch and cheaply: adapters of one shape share a few files of tensors.

Thousands can be registered: each has a folder and a configuration of its own (so a digest of its own), and a hard link to
one of the shared tensor files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.workloads import Adapter

# Tensor files per (rank, targets): neighbours in a batch read different weights, a thousand adapters fit the disk.
VARIANTS = 8
_STANDARD_DEVIATION = 0.02


@dataclass(frozen=True, slots=True)
class Shapes:
    """What an adapter must fit: the base model's (in, out) features per target, in each of `num_layers` layers."""

    num_layers: int
    modules: dict[str, tuple[str, int, int]]  # target -> (module's name within a layer, in features, out features)

    @classmethod
    def of(
        cls,
        *,
        num_layers: int,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> Shapes:
        """Of a model of the Llama family."""
        query, value = num_heads * head_dim, num_kv_heads * head_dim
        return cls(
            num_layers,
            {
                "q_proj": ("self_attn.q_proj", hidden_size, query),
                "k_proj": ("self_attn.k_proj", hidden_size, value),
                "v_proj": ("self_attn.v_proj", hidden_size, value),
                "o_proj": ("self_attn.o_proj", query, hidden_size),
                "gate_proj": ("mlp.gate_proj", hidden_size, intermediate_size),
                "up_proj": ("mlp.up_proj", hidden_size, intermediate_size),
                "down_proj": ("mlp.down_proj", intermediate_size, hidden_size),
            },
        )

    def bytes_per_rank(self, value_bytes: int) -> int:
        """Of A and B over all layers and targets, `value_bytes` a value."""
        return value_bytes * self.num_layers * sum(inputs + outputs for _, inputs, outputs in self.modules.values())


def write(adapters: Iterable[Adapter], shapes: Shapes, cache_dir: Path) -> dict[str, Path]:
    """The directory of each adapter, by name, under `cache_dir`; what is there already is kept."""
    fingerprint = sha256(json.dumps(asdict(shapes)).encode()).hexdigest()[:12]
    root = cache_dir / f"adapters-{fingerprint}"
    directories: dict[str, Path] = {}
    for index, adapter in enumerate(adapters):
        kind = f"r{adapter.rank}-{'-'.join(adapter.targets)}"
        directory = root / kind / adapter.name
        directories[adapter.name] = directory
        if (directory / "adapter_config.json").exists():
            continue
        directory.mkdir(parents=True, exist_ok=True)
        tensors = directory / "adapter_model.safetensors"
        tensors.unlink(missing_ok=True)
        tensors.hardlink_to(_variant(root / kind, adapter, shapes, index % VARIANTS))
        # Last: a folder with a configuration is whole.
        (directory / "adapter_config.json").write_text(json.dumps(_config(adapter)))
    return directories


def _config(adapter: Adapter) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": adapter.rank,
        "lora_alpha": adapter.rank,
        "target_modules": list(adapter.targets),
        "bias": "none",
        # Changes nothing but the digest, so that adapters with equal tensors are different adapters.
        "revision": adapter.name,
    }


def _variant(folder: Path, adapter: Adapter, shapes: Shapes, variant: int) -> Path:
    path = folder / f"variant-{variant}.safetensors"
    if path.exists():
        return path
    rng = np.random.default_rng((adapter.rank, variant))
    tensors: dict[str, npt.NDArray[np.uint16]] = {}
    for layer in range(shapes.num_layers):
        for target in adapter.targets:
            module, inputs, outputs = shapes.modules[target]
            key = f"base_model.model.model.layers.{layer}.{module}.lora_"
            tensors[f"{key}A.weight"] = _random_bf16(rng, (adapter.rank, inputs))
            tensors[f"{key}B.weight"] = _random_bf16(rng, (outputs, adapter.rank))
    partial = path.with_suffix(".partial")
    _save_bf16(tensors, partial)
    partial.rename(path)
    return path


def _random_bf16(rng: np.random.Generator, shape: tuple[int, int]) -> npt.NDArray[np.uint16]:
    values = _STANDARD_DEVIATION * rng.standard_normal(shape, dtype=np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _save_bf16(tensors: dict[str, npt.NDArray[np.uint16]], path: Path) -> None:
    """The safetensors format by hand: its numpy writer has no bf16."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, bits in tensors.items():
        header[name] = {"dtype": "BF16", "shape": bits.shape, "data_offsets": [offset, offset + bits.nbytes]}
        offset += bits.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for bits in tensors.values():
            file.write(bits.tobytes())
