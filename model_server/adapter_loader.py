"""The engine's side of the loader, a process of its own that reads and lays out adapters.

Not a thread of the engine: that would take the interpreter and the memory map from the steps, however low its priority.
Laid-out weights come back as anonymous files that are mapped here, so nothing is copied and no shared-memory limit applies.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection

import torch
from torch import Tensor

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
        self._reader: threading.Thread | None = None
        self._pending: dict[AdapterRef, None] = {}

    def prepare(self) -> None:
        """Start the process, which takes a second or two, before there is anything to load."""
        with self._lock, contextlib.suppress(OSError):  # `start` will try again, and say so
            self._connected()

    def start(self, ref: AdapterRef, path: str) -> None:
        with self._lock:
            self._pending[ref] = None
            try:
                pipe = self._connected()
            except OSError as error:
                del self._pending[ref]
                failure = Failure("UNAVAILABLE", f"adapter {ref.adapter_id}: no process to load it: {error}")
            else:
                with contextlib.suppress(OSError):  # the process died: its reader sees that too, and answers
                    pipe.send((ref, path))
                return
        self._done(ref, failure)

    def close(self) -> None:
        with self._lock:
            process, pipe, reader = self._process, self._pipe, self._reader
            self._process = self._pipe = self._reader = None
            self._pending.clear()
        if process is None or pipe is None or reader is None:
            return
        # Closing alone would not wake the reader, nor reach the process while the reader holds the other end.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
            reader.join()
            pipe.close()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _connected(self) -> Connection:
        if self._pipe is None:
            ours, theirs = multiprocessing.Pipe()
            command = [sys.executable, "-m", "model_server.loader_process", str(theirs.fileno())]
            with theirs:
                process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            reader = threading.Thread(target=self._read, args=(ours, process), name="adapter-loader", daemon=True)
            try:
                reader.start()
            except RuntimeError as error:
                process.kill()
                process.wait()
                raise OSError(str(error)) from error
            self._process, self._pipe, self._reader = process, ours, reader
            with contextlib.suppress(OSError):  # as in `start`
                ours.send(self._setup)
        return self._pipe

    def _read(self, pipe: Connection, process: subprocess.Popen[bytes]) -> None:
        try:
            while True:
                ref, answer = pipe.recv()
                if isinstance(answer, LaidOut):
                    answer = _map(ref, answer, reduction.recv_handle(pipe), self._setup.dtype)
                with self._lock:
                    self._pending.pop(ref, None)
                self._done(ref, answer)
        except Exception as error:  # its end, or what leaves the next message unreadable
            self._lost(pipe, process, error)

    def _lost(self, pipe: Connection, process: subprocess.Popen[bytes], error: Exception) -> None:
        """What the process had to do fails; the next adapter starts another."""
        with self._lock:
            if self._pipe is not pipe:
                return  # closed by us
            failed = list(self._pending)
            self._process = self._pipe = self._reader = None
            self._pending.clear()
        process.kill()  # where it lives
        try:
            status: int | str = process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            status = "unknown"
        pipe.close()
        for ref in failed:
            reason = f"the process that loads adapters was lost, status {status} ({type(error).__name__}: {error})"
            self._done(ref, Failure("UNAVAILABLE", f"adapter {ref.adapter_id}: {reason}"))


def _map(ref: AdapterRef, answer: LaidOut, descriptor: int, dtype: torch.dtype) -> HostAdapter | Failure:
    """The weights stay mapped, without a descriptor of ours, as long as a tensor of theirs is held."""
    try:
        flat = map_file(descriptor, answer.num_bytes // dtype.itemsize, dtype)
    except RuntimeError as error:
        return Failure("RESOURCE_EXHAUSTED", f"adapter {ref.adapter_id}: its weights cannot be mapped: {error}")
    finally:
        os.close(descriptor)
    parts = views(flat, answer.shapes)
    weights = {group: GroupWeights(a, b, answer.ranks[group]) for group, (a, b) in parts.items()}
    return HostAdapter(rank_rows=answer.rank_rows, num_bytes=answer.num_bytes, weights=weights)


def map_file(descriptor: int, num_values: int, dtype: torch.dtype) -> Tensor:
    """The file's contents. Python's mmap would keep a descriptor open for each, of which there are not many."""
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=num_values, dtype=dtype)
