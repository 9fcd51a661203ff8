"""The process that loads adapters, and the layout it makes."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import queue
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from model_server import adapter_loader, loader_process
from model_server.adapter_bank import HostAdapter
from model_server.adapter_layout import load, load_adapter
from model_server.adapter_loader import AdapterLoader
from model_server.messages import Failure
from model_server.models.llama import lora_groups
from model_server.request import AdapterRef
from model_server.weights.huggingface import HuggingFaceDirectory
from tests.model_server.tiny import TinyModel

TIMEOUT_S = 120.0
Results = queue.SimpleQueue[tuple[AdapterRef, HostAdapter | Failure]]


class Loading:
    def __init__(self, files: HuggingFaceDirectory, dtype: torch.dtype = torch.float32) -> None:
        self.results: Results = queue.SimpleQueue()
        self.loader = AdapterLoader(files.config, dtype, 64, lambda ref, result: self.results.put((ref, result)))

    def start(self, name: str, path: Path) -> AdapterRef:
        ref = AdapterRef(name, f"sha256:{name}")
        self.loader.start(ref, str(path))
        return ref

    @property
    def process_id(self) -> int:
        assert self.loader._process is not None
        return self.loader._process.pid


@pytest.fixture
def loading(files: HuggingFaceDirectory) -> Iterator[Loading]:
    loading = Loading(files)
    yield loading
    loading.loader.close()


def test_what_it_lays_out_arrives(loading: Loading, tiny: TinyModel, files: HuggingFaceDirectory) -> None:
    loading.loader.prepare()
    wanted = {loading.start(name, path): path for name, path in tiny.adapters.items()}
    for _ in tiny.adapters:
        ref, result = loading.results.get(timeout=TIMEOUT_S)
        assert isinstance(result, HostAdapter)
        expected = load_adapter(wanted.pop(ref), files.config, torch.float32, 64)
        assert (result.rank_rows, result.num_bytes) == (expected.rank_rows, expected.num_bytes)
        for group, weights in expected.weights.items():
            got = result.weights[group]
            assert got.ranks == weights.ranks
            assert torch.equal(got.a, weights.a) and torch.equal(got.b, weights.b)
    assert os.sched_getscheduler(loading.process_id) == os.SCHED_IDLE


def test_bad_files_fail_their_own_adapter_only(loading: Loading, tiny: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes((tiny.adapters["q4"] / "adapter_config.json").read_bytes())
    (tmp_path / "adapter_model.safetensors").write_bytes(b"nothing of the kind")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "adapter_config.json").write_bytes((tiny.adapters["q4"] / "adapter_config.json").read_bytes())
    save_file({}, empty / "adapter_model.safetensors")
    nothing = loading.start("nothing", empty)
    damaged, missing = loading.start("damaged", tmp_path), loading.start("missing", tmp_path / "nowhere")
    good = loading.start("good", tiny.adapters["q4"])
    results = dict(loading.results.get(timeout=TIMEOUT_S) for _ in range(4))
    assert isinstance(results[good], HostAdapter)
    refusal = results[nothing]
    assert isinstance(refusal, Failure) and refusal.code == "FAILED_PRECONDITION" and "no module" in refusal.message
    for ref in (damaged, missing):
        failure = results[ref]
        assert isinstance(failure, Failure) and failure.damaged_files and ref.adapter_id in failure.message


@pytest.mark.parametrize("lacking", [errno.ENOMEM, errno.EFBIG])
def test_files_are_not_damaged_where_memory_lacks(tiny: TinyModel, files: HuggingFaceDirectory, lacking: int) -> None:
    """Else verified files would be deleted, and fetched again, for as long as it does."""

    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise OSError(lacking, os.strerror(lacking))

    ref = AdapterRef("a", "sha256:a")
    failure = load(ref, tiny.adapters["q4"], files.config, torch.float32, 64, refuse)
    assert isinstance(failure, Failure) and not failure.damaged_files and failure.code == "RESOURCE_EXHAUSTED"


def test_files_are_not_damaged_where_descriptors_lack(
    tiny: TinyModel, files: HuggingFaceDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    failure = load(AdapterRef("a", "sha256:a"), tiny.adapters["q4"], files.config, torch.float32, 64, torch.zeros)
    assert isinstance(failure, Failure) and not failure.damaged_files and failure.code == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize("code", [errno.EPERM, errno.EINVAL, errno.ENOSYS])
def test_the_process_starts_where_it_may_not_be_idle(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    asked: list[int] = []
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    monkeypatch.setattr(os, "nice", asked.append)
    ours, theirs = multiprocessing.Pipe()
    monkeypatch.setattr(sys, "argv", ["loader_process", str(os.dup(theirs.fileno()))])
    ours.close()  # nobody wants anything of it: it returns
    theirs.close()
    loader_process.main()
    assert asked == [19]


def test_when_it_is_killed_what_was_under_way_fails_and_the_next_starts_another(
    loading: Loading, tiny: TinyModel
) -> None:
    loading.start("first", tiny.adapters["q4"])
    assert isinstance(loading.results.get(timeout=TIMEOUT_S)[1], HostAdapter)
    killed = loading.process_id
    os.kill(killed, signal.SIGSTOP)
    lost = loading.start("lost", tiny.adapters["qv3"])
    os.kill(killed, signal.SIGKILL)
    ref, failure = loading.results.get(timeout=TIMEOUT_S)
    assert ref == lost and isinstance(failure, Failure) and failure.code == "UNAVAILABLE"
    assert "lost" in failure.message and str(-signal.SIGKILL.value) in failure.message
    loading.start("again", tiny.adapters["qv3"])
    assert isinstance(loading.results.get(timeout=TIMEOUT_S)[1], HostAdapter)
    assert loading.process_id != killed


def test_it_ends_with_its_user(files: HuggingFaceDirectory, tiny: TinyModel) -> None:
    loading = Loading(files)
    loading.start("a", tiny.adapters["q4"])
    loading.results.get(timeout=TIMEOUT_S)
    process = loading.loader._process
    assert process is not None
    loading.loader.close()
    assert process.poll() == 0, "it had to be killed"
    assert loading.results.empty()


def test_no_process_to_be_had_fails_the_adapter_and_not_the_next(
    loading: Loading, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        loading.loader.prepare()
        loading.start("first", tiny.adapters["q4"])
        failure = loading.results.get(timeout=TIMEOUT_S)[1]
        assert isinstance(failure, Failure) and failure.code == "UNAVAILABLE" and "first" in failure.message
    loading.start("again", tiny.adapters["q4"])
    assert isinstance(loading.results.get(timeout=TIMEOUT_S)[1], HostAdapter)


def test_what_cannot_be_mapped_fails_alone(loading: Loading, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(adapter_loader, "map_file", refuse)
        loading.start("first", tiny.adapters["q4"])
        failure = loading.results.get(timeout=TIMEOUT_S)[1]
        assert isinstance(failure, Failure) and failure.code == "RESOURCE_EXHAUSTED"
    process_id = loading.process_id
    loading.start("again", tiny.adapters["q4"])
    assert isinstance(loading.results.get(timeout=TIMEOUT_S)[1], HostAdapter)
    assert loading.process_id == process_id


def test_a_lost_thread_of_messages_fails_what_was_under_way(
    loading: Loading, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when descriptors run out while one is on its way: the next message cannot be told from it."""

    def refuse(*_: object) -> int:
        raise RuntimeError("received 0 items of ancdata")

    with monkeypatch.context() as patch:
        patch.setattr(adapter_loader.reduction, "recv_handle", refuse)
        loading.start("first", tiny.adapters["q4"])
        failure = loading.results.get(timeout=TIMEOUT_S)[1]
        assert isinstance(failure, Failure) and "ancdata" in failure.message
    loading.start("again", tiny.adapters["q4"])
    assert isinstance(loading.results.get(timeout=TIMEOUT_S)[1], HostAdapter)


def test_an_adapter_takes_no_descriptor(loading: Loading, tiny: TinyModel) -> None:
    results = []
    for index in range(3):
        loading.start(f"a{index}", tiny.adapters["q4"])
        results.append(loading.results.get(timeout=TIMEOUT_S)[1])
        if index == 0:
            before = len(list(Path("/proc/self/fd").iterdir()))
    assert all(isinstance(result, HostAdapter) for result in results)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_weights_outlive_the_loader_and_are_freed_with_the_last_tensor(loading: Loading, tiny: TinyModel) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:adapter")

    before = mapped()
    loading.start("a", tiny.adapters["all8"])
    _, result = loading.results.get(timeout=TIMEOUT_S)
    assert isinstance(result, HostAdapter)
    loading.loader.close()
    assert mapped() > before
    assert all(weights.a.isfinite().all() for weights in result.weights.values())
    result.weights.clear()
    del result
    assert mapped() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_differ_in_rank_in_dtype_and_in_being_there(
    files: HuggingFaceDirectory, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Each module stands where the tables say, scaled, whatever the others are like."""
    generator = torch.Generator().manual_seed(5)
    groups = lora_groups(files.config)
    place = {
        module: (group, index) for group, (_, slices) in groups.items() for index, (module, _) in enumerate(slices)
    }
    shapes = {module: (groups[group][1][index][1], groups[group][0]) for module, (group, index) in place.items()}
    modules = {
        ("self_attn.q_proj", 0): (3, torch.float32),
        ("self_attn.q_proj", 1): (5, torch.bfloat16),
        ("self_attn.v_proj", 1): (2, torch.float16),
        ("mlp.up_proj", 0): (4, torch.float32),
        ("mlp.up_proj", 1): (4, torch.bfloat16),
    }
    tensors = {}
    for (module, layer), (rank, stored) in modules.items():
        out_features, in_features = shapes[module]
        key = f"base_model.model.model.layers.{layer}.{module}"
        tensors[f"{key}.lora_A.weight"] = torch.randn(rank, in_features, generator=generator).to(stored)
        tensors[f"{key}.lora_B.weight"] = torch.randn(out_features, rank, generator=generator).to(stored)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    patterns = {f"layers.{layer}.{module}": rank for (module, layer), (rank, _) in modules.items()}
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 12, "rank_pattern": patterns, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))

    adapter = load_adapter(tmp_path, files.config, dtype, 64)
    assert adapter.rank_rows == {"qkv": 5, "gate_up": 4}
    assert adapter.weights["qkv"].ranks == [5, 0, 2] and adapter.weights["gate_up"].ranks == [0, 4]
    expected = {
        group: (torch.zeros_like(weights.a), torch.zeros_like(weights.b)) for group, weights in adapter.weights.items()
    }
    for (module, layer), (rank, _) in modules.items():
        group, index = place[module]
        key = f"base_model.model.model.layers.{layer}.{module}"
        a, b = expected[group]
        first = sum(features for _, features in groups[group][1][:index])
        a[layer, :rank, index] = tensors[f"{key}.lora_A.weight"].to(dtype)
        scaled = (tensors[f"{key}.lora_B.weight"].float() * (12 / rank)).to(dtype)
        b[layer, :rank, first : first + len(scaled)] = scaled.T
    for group, (a, b) in expected.items():
        assert torch.equal(adapter.weights[group].a, a) and torch.equal(adapter.weights[group].b, b)
