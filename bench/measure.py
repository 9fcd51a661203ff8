"""From timestamps to figures. Pure.

Time to first token runs from a request's scheduled arrival, so a client or server that falls behind is charged for it.
Inter-token gaps are between consecutive tokens as the caller sees them: tokens that come in one message have gaps of 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.workloads import Request

# How finely a distribution is kept for plots: its quantiles at 0, 1, …, 100 %.
_PERCENTS = np.arange(101)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one request saw. Times in seconds after the round's start."""

    token_times_s: tuple[float, ...]
    # Time it waited for its adapter to be read: 0 where that was in memory when it arrived, None where the engine does
    # not say. A copy from host memory to the device is part of the first step and not counted here.
    adapter_load_s: float | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """One round."""

    requests: int
    distinct_adapters: int  # that they ask for
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    itl_ms_p50: float
    itl_ms_p99: float
    adapter_hit_rate: float | None  # of the requests that name an adapter; None without any, or where unknown
    ttft_ms: tuple[float, ...]  # quantiles
    itl_ms: tuple[float, ...]


def figures(requests: Sequence[Request], outcomes: Sequence[Outcome]) -> Figures:
    """`outcomes[i]` is of `requests[i]`. Raises ValueError naming a request that got another number of tokens than asked."""
    for index, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
        if len(outcome.token_times_s) != request.output_tokens:
            raise ValueError(f"request {index} got {len(outcome.token_times_s)} of {request.output_tokens} tokens")
    start_s = min(request.arrival_s for request in requests)
    duration_s = max(outcome.token_times_s[-1] for outcome in outcomes) - start_s
    num_output = sum(request.output_tokens for request in requests)
    num_prompt = sum(len(request.prompt_ids) for request in requests)
    ttft_ms = _quantiles(times_to_first_token_ms(requests, outcomes))
    itl_ms = _quantiles(gaps_ms(outcomes))
    return Figures(
        requests=len(requests),
        distinct_adapters=len({request.adapter for request in requests} - {None}),
        requests_per_s=len(requests) / duration_s,
        output_tokens_per_s=num_output / duration_s,
        total_tokens_per_s=(num_prompt + num_output) / duration_s,
        ttft_ms_p50=ttft_ms[50],
        ttft_ms_p99=ttft_ms[99],
        itl_ms_p50=itl_ms[50],
        itl_ms_p99=itl_ms[99],
        adapter_hit_rate=hit_rate(requests, outcomes),
        ttft_ms=ttft_ms,
        itl_ms=itl_ms,
    )


def times_to_first_token_ms(requests: Sequence[Request], outcomes: Sequence[Outcome]) -> list[float]:
    return [
        1e3 * (outcome.token_times_s[0] - request.arrival_s)
        for request, outcome in zip(requests, outcomes, strict=True)
    ]


def gaps_ms(outcomes: Sequence[Outcome]) -> list[float]:
    """Of all requests together."""
    return [1e3 * gap for outcome in outcomes for gap in np.diff(outcome.token_times_s).tolist()]


def hit_rate(requests: Sequence[Request], outcomes: Sequence[Outcome]) -> float | None:
    loads = [outcome.adapter_load_s for request, outcome in zip(requests, outcomes, strict=True) if request.adapter]
    if not loads or None in loads:
        return None
    return sum(load == 0 for load in loads) / len(loads)


def percentile(values: Sequence[float], percent: float) -> float:
    """NaN of nothing."""
    return float(np.percentile(values, percent)) if values else float("nan")


def _quantiles(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(np.percentile(values or [float("nan")], _PERCENTS).tolist())


def median(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Field by field the median of what several repeats measured; counts, text and series are the first repeat's."""
    merged = dict(rows[0])
    for key, value in rows[0].items():
        if isinstance(value, float):
            merged[key] = statistics.median(row[key] for row in rows)
    return merged
