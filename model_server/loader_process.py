"""The process that reads and lays out adapters: `python -m model_server.loader_process FD`, started by adapter_loader.py.

It ends when the engine does. Of the cores it gets what the steps leave: where these use all of them, the moments between two
steps. At a mere low priority it delayed threads of a step that woke beside it, time and again, since a running thread keeps
its core for some milliseconds; only one of the idle class yields at once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from model_server.adapter_loader import LaidOut, Setup
    from model_server.messages import Failure
    from model_server.request import AdapterRef

_NUM_THREADS = 2


def main() -> None:
    # Before the imports, which are a second's work.
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:  # sandboxes forbid it, or do not know it
        with contextlib.suppress(OSError):
            os.nice(19)
    pipe = Connection(int(sys.argv[1]))
    try:
        setup: Setup = pipe.recv()
    except (EOFError, OSError):
        return
    import torch

    torch.set_num_threads(1)
    lock = threading.Lock()
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        while True:
            try:
                ref, path = pipe.recv()
            except (EOFError, OSError):
                os._exit(0)  # the engine is gone; nobody waits for what is under way
            threads.submit(_load, pipe, lock, setup, ref, path)


def _load(pipe: Connection, lock: threading.Lock, setup: Setup, ref: AdapterRef, path: str) -> None:
    from model_server import adapter_layout
    from model_server.adapter_loader import LaidOut
    from model_server.messages import Failure

    descriptor = -1
    try:
        descriptor = os.memfd_create("adapter", os.MFD_CLOEXEC)
        result = adapter_layout.load(
            ref, Path(path), setup.config, setup.dtype, setup.max_rank, functools.partial(_allocate, descriptor)
        )
        answer: LaidOut | Failure = (
            result
            if isinstance(result, Failure)
            else LaidOut(
                result.rank_rows,
                result.num_bytes,
                {group: (tuple(w.a.shape), tuple(w.b.shape)) for group, w in result.weights.items()},
                {group: w.ranks for group, w in result.weights.items()},
            )
        )
        with lock:
            pipe.send((ref, answer))
            if isinstance(answer, LaidOut):
                reduction.send_handle(pipe, descriptor, os.getppid())
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the engine is gone
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # it cannot be told what became of this adapter: it sees that we end
    os.close(descriptor)


def _allocate(descriptor: int, num_values: int, *, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that are the file's contents."""
    from model_server.adapter_loader import map_file

    os.ftruncate(descriptor, num_values * dtype.itemsize)
    return map_file(descriptor, num_values, dtype)


if __name__ == "__main__":
    main()
