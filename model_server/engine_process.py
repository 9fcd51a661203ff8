"""The engine's own process: builds the runner, then turns steps until told to stop or its parent is gone.

A reader thread drains the pipe into the inbox, so the serving process never blocks on a long step; the main thread owns the
engine and the device.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from kernels.ops import Ops
from model_server import host_memory, messages
from model_server.adapter_bank import HostAdapter
from model_server.adapter_loader import AdapterLoader
from model_server.config import Config
from model_server.engine import Engine
from model_server.models.llama import LlamaModel
from model_server.request import AdapterRef
from model_server.sampler import SamplingOps
from model_server.scheduler import Limits
from model_server.torch_runner import Memory, TorchRunner, kv_bytes_per_page
from model_server.weights import open_model

# On a device of its own, what is free but for graphs and activations; on the host, a part: replicas share the machine.
_CUDA_SHARE = 0.9
_HOST_SHARE = 0.25


def main(config: Config, pipe: Connection) -> None:
    """Entry point of the process. Ends when the pipe says Stop or closes; any other end is a crash, for the parent to see."""
    # Ctrl-C reaches the whole process group; when to stop is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    torch.set_grad_enabled(False)

    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, inbox), name="inbox", daemon=True).start()

    outbox: list[Any] = []
    files = open_model(config.model)
    dtype, device = getattr(torch, config.dtype), torch.device(config.device)
    ops, sampling_ops = _backend(config)
    model = LlamaModel(
        files.config,
        files.tensors(),
        ops,
        dtype,
        device,
        progress=lambda done, total: pipe.send([messages.Loading(done, total)]),
    )
    memory_bytes = config.memory_bytes or _free_bytes(device)
    parts = config.memory_parts(memory_bytes, kv_bytes_per_page(files.config, dtype))
    runner = TorchRunner(
        files.config,
        model,
        ops,
        sampling_ops,
        dtype=dtype,
        device=device,
        memory=Memory(parts.kv_bytes, parts.adapter_bytes, config.max_adapters, config.max_rank),
        logits_dir=config.logits_dir,
        graph_batch=config.max_running if config.device == "cuda" else 0,
    )
    info = runner.info
    loader = AdapterLoader(files.config, dtype, info.max_rank, lambda ref, result: inbox.put(_Loaded(ref, result)))
    engine = Engine(
        runner,
        loader,
        Limits(
            page_size=info.page_size,
            max_batch_tokens=config.max_batch_tokens,
            max_prefill_tokens=config.max_prefill_tokens,
            max_slowdown=config.max_slowdown if info.fixed_rows is not None else None,
            fixed_rows=info.fixed_rows or 0.0,
            max_running=config.max_running,
            ageing_s=config.ageing_s,
            prefetch=info.loads_ahead,
        ),
        host_bytes_limit=config.host_adapter_bytes,
        clock=time.monotonic,
        emit=outbox.append,
        prefix_cache=config.prefix_cache,
        check_every_step=config.check_every_step,
    )
    engine.step()  # nothing to compute, but a first status: until then every page would seem taken
    outbox.append(messages.Ready(info))
    if info.adapter_bytes:
        loader.prepare()
    try:
        _turn(engine, inbox, outbox, pipe)
    finally:
        loader.close()


class _Loaded:
    """The loader's result, on its way to the engine's thread."""

    def __init__(self, ref: AdapterRef, result: HostAdapter | messages.Failure) -> None:
        self.ref = ref
        self.result = result


def _backend(config: Config) -> tuple[Ops, SamplingOps]:
    if config.device == "cuda":
        from kernels import triton_sampling
        from kernels.triton_ops import TritonOps

        return TritonOps(config.max_batch_tokens, config.device), triton_sampling
    from kernels.cpu.ops import CpuOps
    from kernels.reference import sampling

    return CpuOps(config.weight_dtype), sampling


def _free_bytes(device: torch.device) -> int:
    """What KV pages and adapters may take, now that the weights are there."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading left behind is free too
        return int(torch.cuda.mem_get_info(device)[0] * _CUDA_SHARE)
    return int(host_memory.available_bytes() * _HOST_SHARE)


def _read(pipe: Connection, inbox: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            inbox.put(pipe.recv())
    except (EOFError, OSError):
        inbox.put(messages.Stop())


def _turn(engine: Engine, inbox: queue.SimpleQueue[Any], outbox: list[Any], pipe: Connection) -> None:
    while True:
        if outbox:
            try:
                pipe.send(outbox)
            except OSError:
                return  # the parent is gone
            outbox.clear()
        for message in _drain(inbox, engine):
            match message:
                case messages.Stop():
                    return
                case _Loaded():
                    engine.adapter_loaded(message.ref, message.result)
                case _:
                    engine.handle(message)
        engine.step()


def _drain(inbox: queue.SimpleQueue[Any], engine: Engine) -> list[Any]:
    """What is in the inbox now. An engine without work waits: for a message, or until a request's deadline comes."""
    drained: list[Any] = []
    try:
        if not engine.has_work:
            if inbox.empty():
                engine.rest()
            deadline_s = engine.next_deadline_s()
            timeout_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            drained.append(inbox.get(timeout=timeout_s))
        while True:
            drained.append(inbox.get_nowait())
    except queue.Empty:
        return drained
