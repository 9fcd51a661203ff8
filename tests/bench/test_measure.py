"""Figures from timestamps that are known."""

from __future__ import annotations

import math

import pytest

from bench import measure, reports, workloads
from bench.measure import Outcome
from bench.reports import Played
from bench.workloads import Request


def request(arrival_s: float = 0.0, output_tokens: int = 4, adapter: str | None = None, tenant: str = "a") -> Request:
    return Request(arrival_s, (1, 2), output_tokens, adapter, tenant)


def steady(first_s: float, gap_s: float, count: int = 4, load_s: float | None = 0.0) -> Outcome:
    return Outcome(tuple(first_s + index * gap_s for index in range(count)), load_s)


def test_rates_and_latencies() -> None:
    requests = [request(1.0), request(2.0)]
    found = measure.figures(requests, [steady(1.5, 0.5), steady(2.25, 0.25)])
    # From the first arrival at 1.0 to the last token at 3.0.
    assert found.requests_per_s == pytest.approx(2 / 2)
    assert found.output_tokens_per_s == pytest.approx(8 / 2)
    assert found.total_tokens_per_s == pytest.approx(12 / 2)
    assert found.ttft_ms_p50 == pytest.approx(375)
    assert found.ttft_ms_p99 == pytest.approx(250 + 0.99 * 250)
    assert found.itl_ms_p50 == pytest.approx(375) and found.itl_ms_p99 == pytest.approx(500)
    assert len(found.ttft_ms) == len(found.itl_ms) == 101
    assert found.adapter_hit_rate is None and found.distinct_adapters == 0


def test_one_token_has_no_gaps() -> None:
    found = measure.figures([request(output_tokens=1)], [Outcome((0.5,))])
    assert found.output_tokens_per_s == pytest.approx(2) and math.isnan(found.itl_ms_p99)


def test_a_missing_token_is_no_measurement() -> None:
    with pytest.raises(ValueError, match="request 1 got 3 of 4 tokens"):
        measure.figures([request(), request()], [steady(0, 1), steady(0, 1, count=3)])


def test_hit_rate_counts_requests_with_adapters() -> None:
    requests = [request(), request(adapter="x"), request(adapter="x"), request(adapter="y")]
    loads = [0.0, 0.3, 0.0, 0.0]
    assert measure.figures(requests, [steady(0, 1) for _ in requests]).distinct_adapters == 2
    assert measure.hit_rate(requests, [steady(0, 1, load_s=load) for load in loads]) == pytest.approx(2 / 3)
    assert measure.hit_rate(requests, [steady(0, 1, load_s=None)] * 4) is None


def test_median_of_repeats() -> None:
    rows = [{"engine": "e", "requests": 4, "a": value, "b": None} for value in (3.0, 1.0, 2.0)]
    assert measure.median(rows) == {"engine": "e", "requests": 4, "a": 2.0, "b": None}


def test_cold_storm_compares_the_others() -> None:
    others, storm = request(tenant=workloads.STEADY), request(tenant=workloads.STORM, adapter="cold")
    rounds = {
        workloads.QUIET: Played([others], [steady(0, 0.010)]),
        workloads.MAIN: Played([others, storm], [steady(0, 0.030), steady(0, 9)]),
        workloads.WARM: Played([others, storm], [steady(0, 0.020), steady(0, 9)]),
    }
    found = reports.report("cold-storm", rounds)
    assert found["others_itl_ms_p99"] == pytest.approx(30)
    assert found["others_itl_ratio_to_quiet"] == pytest.approx(3)
    assert found["others_itl_ratio_to_warm"] == pytest.approx(1.5)


def test_slot_thrash_compares_first_tokens() -> None:
    requests = [request(), request(1.0)]
    rounds = {
        workloads.MAIN: Played(requests, [steady(0.3, 1), steady(1.3, 1)]),
        reports.ALL_RESIDENT: Played(requests, [steady(0.1, 1), steady(1.2, 1)]),
    }
    found = reports.report("slot-thrash", rounds)
    assert found["ttft_ms_p50_all_resident"] == pytest.approx(150)
    assert found["ttft_ratio_to_all_resident"] == pytest.approx(2)


@pytest.mark.parametrize(("calm_first_s", "gap", "share"), [(0.1, 0, 0.0), (20.1, 21, 1.0)])
def test_two_tenants_reports_the_service_gap(calm_first_s: float, gap: int, share: float) -> None:
    """Served alike there is no gap; served after the other, all of the common time is one."""
    requests = [request(output_tokens=20, tenant=tenant) for tenant in (workloads.FLOOD, workloads.CALM)]
    outcomes = [steady(0.1, 1.0, count=20), steady(calm_first_s, 1.0, count=20)]
    found = reports.report("two-tenants", {workloads.MAIN: Played(requests, outcomes)})
    assert found["service"][0] == [0.25, 3, 3 if calm_first_s < 1 else 0]
    assert found["service_gap_tokens_max"] == gap and found["service_gap_share"] == pytest.approx(share)
    assert found["calm_ttft_ms_p50"] == pytest.approx(1e3 * calm_first_s)
