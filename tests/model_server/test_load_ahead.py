"""The order in which a GPU is told to load ahead, with streams that only take notes: no step reads rows half written, no
copy overwrites rows that an earlier step may still read, and the step itself waits for neither."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.cpu.ops import CpuOps
from model_server.weights.huggingface import HuggingFaceDirectory
from tests.model_server.local_engine import LocalEngine
from tests.model_server.tiny import TinyModel


class Notes:
    """Main stream and copying stream; what they were told, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.copying = False

    def wait_stream(self, other: object) -> None:
        self.told.append("join copies")

    def record_event(self) -> str:
        self.told.append("mark")
        return "mark"

    def wait_event(self, event: str) -> None:
        self.told.append(f"copies wait for {event}")

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.copying = True
        yield
        self.copying = False


def test_copies_are_fenced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = TinyModel(tmp_path)
    limits = {"max_batch_tokens": 32, "max_running": 1, "prefetch": True}
    local = LocalEngine(HuggingFaceDirectory(tiny.directory), CpuOps(), tiny.adapters, max_adapters=2, **limits)
    notes, runner = Notes(), local.runner
    runner._copies = notes
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: notes)
    monkeypatch.setattr(torch.cuda, "stream", notes.stream)
    write, forward = runner._write, runner._forward

    def noted_write(*arguments: object) -> None:
        notes.told.append("copy ahead" if notes.copying else "copy")
        write(*arguments)

    def noted_forward(*arguments: object) -> torch.Tensor:
        notes.told.append("step")
        return forward(*arguments)

    runner._write, runner._forward = noted_write, noted_forward
    keys = [local.submit([5, 6, 7], 2, name) for name in ("q4", "qv3")]
    local.run()
    assert [local.tokens[key] for key in keys] == [tiny.greedy(name, [5, 6, 7], 2) for name in ("q4", "qv3")]
    first = ["join copies", "copy", "join copies", "mark", "step", "copies wait for mark", "copy ahead"]
    assert notes.told == first + 3 * ["join copies", "step"]
