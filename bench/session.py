"""One engine on one workload: started, warmed up, then measured repeat by repeat, so that engines can take turns."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench import adapters, measure, peer_setup, reports, workloads
from bench.engines.engine import Engine, Setup
from bench.workloads import Workload
from model_server.model_config import ModelConfig
from model_server.weights import open_model

LORAMUX, LORAMUX_GRPC = "loramux", "loramux-grpc"
ENGINES = (LORAMUX, LORAMUX_GRPC, *peer_setup.PEERS)
# Up to here all adapters of a workload are given room on the device; beyond, the engine keeps its own limit.
_MAX_ADAPTER_BYTES = 2**30
_LEAST_ADAPTER_BYTES = 512 * 2**20
_VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured on; the same for every engine of a comparison."""

    model: str = peer_setup.SMOLLM2
    dtype: str = "bfloat16"
    device: str = "cpu"
    max_running: int = 64
    settings: Mapping[str, str] = field(default_factory=dict)  # of our model server

    def with_settings(self, more: Mapping[str, str]) -> Options:
        return replace(self, settings={**self.settings, **more})


class Session:
    """Entering starts the engine and plays the warm-up.

    Raises ValueError for what the engine cannot do, RuntimeError where it fails.
    """

    def __init__(self, engine: str, workload: Workload, options: Options) -> None:
        if engine not in ENGINES:
            raise ValueError(f"engine: {engine!r} is none of {', '.join(ENGINES)}")
        self._name = engine
        self._workload = workload
        self._options = options
        self._running = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as starting:
            self._engine = self._start(starting, self._workload.max_resident)
            self._roomy = None if self._workload.max_resident is None else self._start(starting, None)
            self._running = starting.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._running.close()

    def repeat(self, index: int) -> dict[str, Any]:
        """Play repeat `index` of the workload; its result row."""
        rounds = dict(self._workload.repeats[index])
        played = {name: reports.Played(requests, self._engine.play(requests)) for name, requests in rounds.items()}
        main = rounds[workloads.MAIN]
        if self._roomy is not None:
            played[reports.ALL_RESIDENT] = reports.Played(main, self._roomy.play(main))
        return {
            "workload": self._workload.name,
            "engine": self._name,
            "adapters": self._workload.num_adapters,
            **asdict(measure.figures(main, played[workloads.MAIN].outcomes)),
            **reports.report(self._workload.name, played),
            **self._engine.facts,
            "device": device_name(self._options.device),
        }

    def _start(self, stack: ExitStack, max_resident: int | None) -> Engine:
        engine = stack.enter_context(_engine(self._name, self._setup(max_resident)))
        engine.play(self._workload.warm_up)
        return engine

    def _setup(self, max_resident: int | None) -> Setup:
        workload, options = self._workload, self._options
        shapes = adapter_shapes(open_model(options.model).config)
        cache_dir = peer_setup.BUILD / "bench"
        # Adapters keep the dtype of activations, whatever the weights are stored in.
        rank_bytes = shapes.bytes_per_rank(_VALUE_BYTES[options.dtype])
        wanted = sum(adapter.rank for adapter in workload.adapters) * rank_bytes
        return Setup(
            model=options.model,
            dtype=options.dtype,
            adapters=adapters.write(workload.adapters, shapes, cache_dir),
            max_rank=workload.max_rank,
            adapter_bytes=max(wanted, _LEAST_ADAPTER_BYTES) if wanted <= _MAX_ADAPTER_BYTES else None,
            max_tokens=workload.max_tokens,
            tenants=tuple(sorted({request.tenant for request in workload.requests})),
            max_resident=max_resident,
            max_running=options.max_running,
            device=options.device,
            settings=options.settings,
        )


def adapter_shapes(config: ModelConfig) -> adapters.Shapes:
    return adapters.Shapes.of(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def device_name(device: str) -> str:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return f"{len(os.sched_getaffinity(0))} cores of {model}"


def _engine(name: str, setup: Setup) -> Engine:
    # Imported for the one that is asked for: a comparison of peers needs no torch.
    if name == LORAMUX:
        from bench.engines.loramux_engine import LoramuxEngine

        return LoramuxEngine(setup)
    if name == LORAMUX_GRPC:
        from bench.engines.loramux_grpc import LoramuxGrpc

        return LoramuxGrpc(setup)
    from bench.engines.peer import PeerEngine

    return PeerEngine(name, setup)
