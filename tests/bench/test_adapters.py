"""The random adapters are ones that PEFT, the store and the model server take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from adapter_store.validate import validate
from bench import adapters, workloads
from bench.session import adapter_shapes
from bench.workloads import Adapter
from model_server.adapter_layout import load_adapter
from model_server.weights import open_model


@pytest.fixture(scope="module")
def shapes() -> adapters.Shapes:
    return adapter_shapes(open_model("smollm2").config)


def test_the_store_and_the_model_server_take_them(shapes: adapters.Shapes, tmp_path: Path) -> None:
    wanted = [Adapter("all", 4), Adapter("attention", 3, workloads.ATTENTION_TARGETS)]
    directories = adapters.write(wanted, shapes, tmp_path)
    for adapter in wanted:
        folder = directories[adapter.name]
        facts = validate((folder / "adapter_config.json").read_bytes(), folder / "adapter_model.safetensors")
        assert facts.max_rank == adapter.rank and facts.target_modules == tuple(sorted(adapter.targets))
    host = load_adapter(directories["all"], open_model("smollm2").config, torch.bfloat16, 8)
    assert host.rank_rows == {"qkv": 4, "o": 4, "gate_up": 4, "down": 4}
    assert host.num_bytes == 4 * shapes.bytes_per_rank(2)


def test_values_are_random_and_of_sensible_size(shapes: adapters.Shapes, tmp_path: Path) -> None:
    [folder] = adapters.write([Adapter("a", 16, ("q_proj",))], shapes, tmp_path).values()
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 60 and {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    values = torch.cat([tensor.float().flatten() for tensor in tensors.values()])
    assert values.std().item() == pytest.approx(0.02, rel=0.02) and abs(values.mean().item()) < 1e-3


def test_a_thousand_cost_little_and_are_written_once(shapes: adapters.Shapes, tmp_path: Path) -> None:
    wanted = [Adapter(f"a{index}", 1, ("q_proj",)) for index in range(1000)]
    directories = adapters.write(wanted, shapes, tmp_path)
    inodes = {(folder / "adapter_model.safetensors").stat().st_ino for folder in directories.values()}
    configs = {(folder / "adapter_config.json").read_bytes() for folder in directories.values()}
    assert len(inodes) == adapters.VARIANTS and len(configs) == 1000
    written = directories["a0"].joinpath("adapter_config.json").stat().st_mtime_ns
    assert adapters.write(wanted, shapes, tmp_path) == directories
    assert directories["a0"].joinpath("adapter_config.json").stat().st_mtime_ns == written
