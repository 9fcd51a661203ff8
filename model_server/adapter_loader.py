"""The engine's side of the loader, a process of its own that reads and lays out adapters.

Not a thread of the engine: that would take the interpreter and the memory map from the steps, however low its priority.
Laid-out weights come back as anonymous files that are mapped here, so nothing is copied and no shared-memory limit applies.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection

import torch

from model_server.adapter_bank import HostAdapter
from model_server.adapter_layout import GroupWeights, Shapes, views
from model_server.messages import Failure
from model_server.model_config import ModelConfig
from model_server.request import AdapterRef

_STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to the process; from then on each is an (AdapterRef, path)."""

    config: ModelConfig
    dtype: torch.dtype
    max_rank: int


@dataclass(frozen=True, slots=True)
class LaidOut:
    """An answer, followed by the descriptor of a file with the weights: the `views` of it."""

    rank_rows: Mapping[str, int]
    num_bytes: int
    shapes: Mapping[str, Shapes]
    ranks: Mapping[str, list[int]]  # of a group's slices


class AdapterLoader:
    """`done(ref, result)` is called on a thread of its own; the receiver hands it to the engine's inbox."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        max_rank: int,
        done: Callable[[AdapterRef, HostAdapter | Failure], None],
    ) -> None:
        self._setup = Setup(config, dtype, max_rank)
        self._done = done
        self._lock = threading.Lock()  # over what follows
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._pending: dict[AdapterRef, None] = {}

    def prepare(self) -> None:
        """Start the process, which takes a second or two, before there is anything to load."""
        with self._lock:
            self._connected()

    def start(self, ref: AdapterRef, path: str) -> None:
        with self._lock:
            self._pending[ref] = None
            with contextlib.suppress(OSError):  # it died: its reader says so
                self._connected().send((ref, path))

    def close(self) -> None:
        with self._lock:
            process, pipe = self._process, self._pipe
            self._process = self._pipe = None
            self._pending.clear()
        if process is not None and pipe is not None:
            pipe.close()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _connected(self) -> Connection:
        if self._pipe is None:
            self._pipe, theirs = multiprocessing.Pipe()
            command = [sys.executable, "-m", "model_server.loader_process", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            theirs.close()
            self._pipe.send(self._setup)
            threading.Thread(target=self._read, args=(self._pipe,), name="adapter-loader", daemon=True).start()
        return self._pipe

    def _read(self, pipe: Connection) -> None:
        try:
            while True:
                ref, answer = pipe.recv()
                result = (
                    _map(answer, reduction.recv_handle(pipe), self._setup.dtype)
                    if isinstance(answer, LaidOut)
                    else answer
                )
                with self._lock:
                    self._pending.pop(ref, None)
                self._done(ref, result)
        except (EOFError, OSError):
            self._lost(pipe)

    def _lost(self, pipe: Connection) -> None:
        """The process is gone. What it had to do fails; the next adapter starts another."""
        with self._lock:
            if self._pipe is not pipe:
                return  # closed by us
            process, failed = self._process, list(self._pending)
            self._process = self._pipe = None
            self._pending.clear()
        status = process.wait() if process is not None else None
        pipe.close()
        for ref in failed:
            message = f"adapter {ref.adapter_id}: the process that loads adapters ended with status {status}"
            self._done(ref, Failure("UNAVAILABLE", message))


def _map(answer: LaidOut, descriptor: int, dtype: torch.dtype) -> HostAdapter:
    """The weights stay mapped as long as a tensor of theirs is held."""
    try:
        data = mmap.mmap(descriptor, answer.num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)
    parts = views(torch.frombuffer(data, dtype=dtype), answer.shapes)
    weights = {group: GroupWeights(a, b, answer.ranks[group]) for group, (a, b) in parts.items()}
    return HostAdapter(rank_rows=answer.rank_rows, num_bytes=answer.num_bytes, weights=weights)
