"""What some workloads are about besides the common figures: one round against another, one tenant against the other. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench import measure, workloads
from bench.measure import Outcome
from bench.workloads import Request

# The round of an engine that has room for all adapters, where the workload limits it.
ALL_RESIDENT = "all-resident"
_GAP_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True)
class Played:
    requests: Sequence[Request]
    outcomes: Sequence[Outcome]

    def of(self, tenant: str) -> Played:
        pairs = [(r, o) for r, o in zip(self.requests, self.outcomes, strict=True) if r.tenant == tenant]
        return Played([request for request, _ in pairs], [outcome for _, outcome in pairs])


def report(workload: str, rounds: Mapping[str, Played]) -> dict[str, Any]:
    """The further fields of a result row, by the workload's name."""
    if workload == "cold-storm":
        return cold_storm(rounds)
    if workload == "slot-thrash":
        return slot_thrash(rounds)
    if workload == "two-tenants":
        return two_tenants(rounds[workloads.MAIN])
    return {}


def cold_storm(rounds: Mapping[str, Played]) -> dict[str, Any]:
    """Inter-token gaps of the steady requests: alone, in the storm, and in the same storm with its adapters in memory."""
    gaps = {name: measure.gaps_ms(rounds[name].of(workloads.STEADY).outcomes) for name in rounds}
    p99 = {name: measure.percentile(values, 99) for name, values in gaps.items()}
    return {
        "others_itl_ms_p99": p99[workloads.MAIN],
        "others_itl_ms_p99_quiet": p99[workloads.QUIET],
        "others_itl_ms_p99_warm": p99[workloads.WARM],
        "others_itl_ratio_to_quiet": p99[workloads.MAIN] / p99[workloads.QUIET],
        "others_itl_ratio_to_warm": p99[workloads.MAIN] / p99[workloads.WARM],
    }


def slot_thrash(rounds: Mapping[str, Played]) -> dict[str, Any]:
    """Time to first token against an engine that holds all adapters."""
    main, free = rounds[workloads.MAIN], rounds[ALL_RESIDENT]
    p50 = measure.percentile(measure.times_to_first_token_ms(main.requests, main.outcomes), 50)
    free_p50 = measure.percentile(measure.times_to_first_token_ms(free.requests, free.outcomes), 50)
    return {"ttft_ms_p50_all_resident": free_p50, "ttft_ratio_to_all_resident": p50 / free_p50}


def two_tenants(played: Played) -> dict[str, Any]:
    """Tokens served to each tenant over time, and the largest gap while both have work.

    A request's prompt counts when its first token comes. `service` is [seconds, flood, calm] every quarter second;
    `service_gap_share` is the largest gap, of what both got until then together, from a tenth of the common time on.
    """
    served = {tenant: _service(played.of(tenant)) for tenant in (workloads.FLOOD, workloads.CALM)}
    common_end_s = min(times[-1][0] for times in served.values())
    series = []
    step = 1
    while (now_s := step * _GAP_INTERVAL_S) <= common_end_s:
        series.append([now_s, *(sum(n for at_s, n in times if at_s <= now_s) for times in served.values())])
        step += 1
    settled = [row for row in series if row[0] >= common_end_s / 10]
    return {
        "service": series,
        "service_gap_tokens_max": max((abs(flood - calm) for _, flood, calm in settled), default=0),
        "service_gap_share": max((abs(f - c) / max(1, f + c) for _, f, c in settled), default=0.0),
        "calm_ttft_ms_p50": _ttft_p50(played.of(workloads.CALM)),
        "flood_ttft_ms_p50": _ttft_p50(played.of(workloads.FLOOD)),
    }


def _ttft_p50(played: Played) -> float:
    return measure.percentile(measure.times_to_first_token_ms(played.requests, played.outcomes), 50)


def _service(played: Played) -> list[tuple[float, int]]:
    """(time, tokens served then), in order of time."""
    events: list[tuple[float, int]] = []
    for request, outcome in zip(played.requests, played.outcomes, strict=True):
        events.append((outcome.token_times_s[0], len(request.prompt_ids)))
        events += [(at_s, 1) for at_s in outcome.token_times_s]
    return sorted(events)
