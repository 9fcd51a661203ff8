"""The process that reads and lays out adapters: `python -m model_server.loader_process FD`, started by adapter_loader.py.

It works at low priority, so that where cores are few the steps keep them, and ends when the engine does.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from model_server.adapter_bank import HostAdapter
    from model_server.adapter_loader import LaidOut, Setup
    from model_server.messages import Failure
    from model_server.request import AdapterRef

_NICENESS = 10
_NUM_THREADS = 2


def main() -> None:
    os.nice(_NICENESS)  # before the imports, which are a second's work
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
    from model_server import adapter_layout, messages

    result = adapter_layout.load(ref, Path(path), setup.config, setup.dtype, setup.max_rank)
    try:
        answer, descriptor = (result, None) if isinstance(result, messages.Failure) else _write(result)
    except OSError as error:
        answer, descriptor = messages.Failure("RESOURCE_EXHAUSTED", f"adapter {ref.adapter_id}: no memory: {error}"), None
    try:
        with lock:
            pipe.send((ref, answer))
            if descriptor is not None:
                reduction.send_handle(pipe, descriptor, os.getppid())
    except OSError:
        pass  # the engine is gone: main sees it too
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _write(adapter: HostAdapter) -> tuple[LaidOut, int]:
    """Its weights in an anonymous file, and the file's descriptor."""
    import torch

    from model_server.adapter_loader import ALIGNMENT, LaidOut, Part

    descriptor = os.memfd_create("adapter", os.MFD_CLOEXEC)
    end = 0

    def part(tensor: torch.Tensor) -> Part:
        nonlocal end
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        data = memoryview(tensor.view(torch.uint8).numpy().reshape(-1))
        written = 0
        while written < len(data):
            written += os.pwrite(descriptor, data[written:], offset + written)
        end = offset + len(data)
        return Part(offset, tuple(tensor.shape))

    try:
        groups = {group: (part(w.a), part(w.b), w.ranks) for group, w in adapter.weights.items()}
    except OSError:
        os.close(descriptor)
        raise
    return LaidOut(adapter.rank_rows, adapter.num_bytes, end, groups), descriptor


if __name__ == "__main__":
    main()
