"""Workloads are what their definitions say, and the same from the same seed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from bench import workloads
from bench.workloads import MAIN, Request


def main_of(name: str, **sizes: float) -> tuple[Request, ...]:
    return workloads.build(name, **sizes).repeats[0][MAIN]


def per_adapter(requests: Sequence[Request]) -> list[int]:
    return [count for _, count in Counter(request.adapter for request in requests).most_common()]


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_one_seed_gives_one_workload(name: str) -> None:
    assert workloads.build(name, seed=3, repeats=2) == workloads.build(name, seed=3, repeats=2)
    assert workloads.build(name, seed=3) != workloads.build(name, seed=4)


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_every_workload_can_be_played(name: str) -> None:
    workload = workloads.build(name, repeats=3)
    assert len(workload.repeats) == 3
    registered = {adapter.name for adapter in workload.adapters}
    assert len(registered) == len(workload.adapters)
    for request in workload.requests:
        assert request.prompt_ids and request.output_tokens >= 1 and request.arrival_s >= 0
        assert request.adapter is None or request.adapter in registered
        assert len(request.prompt_ids) + request.output_tokens <= workload.max_tokens


def test_flat_has_one_length_and_adapters_in_turn() -> None:
    requests = main_of("flat", requests=32, prompt_tokens=64, output_tokens=48, adapters=8)
    assert {(len(r.prompt_ids), r.output_tokens, r.arrival_s) for r in requests} == {(64, 48, 0.0)}
    assert per_adapter(requests) == [4] * 8
    assert len({r.prompt_ids for r in requests}) == 32
    assert per_adapter(main_of("flat")) == [32] and main_of("flat")[0].adapter is None


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        ("distinct", [1] * 32),
        ("identical", [32]),
        ("uniform", [6, 6, 5, 5, 5, 5]),
        ("skewed", [11, 7, 5, 3, 2, 1, 1, 1, 1]),
    ],
)
def test_punica_deals_requests_to_adapters_as_its_kind_says(kind: str, counts: list[int]) -> None:
    assert workloads.punica_counts(kind, 32) == counts
    assert per_adapter(main_of(f"punica-{kind}", requests=32)) == counts


@pytest.mark.parametrize("requests", [1, 2, 7, 100, 1000])
def test_punica_skewed_shrinks_by_half_again(requests: int) -> None:
    counts = workloads.punica_counts("skewed", requests)
    assert sum(counts) == requests
    for more, fewer in itertools.pairwise(counts):
        assert fewer <= more
        if fewer > 10:
            assert more / fewer == pytest.approx(1.5, rel=0.1)


def test_punica_lengths() -> None:
    requests = main_of("punica-identical", requests=2000, max_total_tokens=2048)
    prompts = np.array([len(r.prompt_ids) for r in requests])
    totals = prompts + [r.output_tokens for r in requests]
    assert np.median(prompts) == pytest.approx(18 - 1, abs=1.5)  # the median of exp(0.8 z) is 1
    assert np.percentile(prompts, 84) == pytest.approx(18 * np.exp(0.8) - 1, rel=0.1)
    assert totals.max() <= 2048 and totals.mean() == pytest.approx(1024, rel=0.05)


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_s_lora_arrivals_are_gamma(cv: float) -> None:
    arrivals = [r.arrival_s for r in main_of("s-lora", rate=10, duration_s=400, cv=cv, max_tokens=16)]
    gaps = np.diff(arrivals)
    assert gaps.mean() == pytest.approx(0.1, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)
    assert arrivals[-1] < 400


def test_s_lora_lengths_and_adapters() -> None:
    workload = workloads.build("s-lora", rate=10, duration_s=200, adapters=100, alpha=0.5)
    requests = workload.repeats[0][MAIN]
    for lengths in ([len(r.prompt_ids) for r in requests], [r.output_tokens for r in requests]):
        assert min(lengths) >= 8 and max(lengths) < 512 and np.mean(lengths) == pytest.approx(260, rel=0.06)
    # ⌊n·U²⌋: a tenth of all is for the first of a hundred, half for the first quarter.
    shares = np.array(per_adapter(requests)) / len(requests)
    assert shares[0] == pytest.approx(0.1, abs=0.03)
    assert shares[:25].sum() == pytest.approx(0.5, rel=0.1)
    assert workload.num_adapters == 100 and len(workload.adapters) == 101


@pytest.mark.parametrize(("name", "adapters"), [("s-lora", 1000), ("chameleon", 1000)])
def test_adapters_are_cold_in_every_repeat(name: str, adapters: int) -> None:
    workload = workloads.build(name, adapters=adapters, repeats=3)
    assert {r.adapter for r in workload.warm_up} == {None, workloads.WARM_UP}
    mains = [rounds[MAIN] for rounds in workload.repeats]
    asked = [{r.adapter for r in main} for main in mains]
    assert workloads.WARM_UP not in set.union(*asked)
    assert sum(map(len, asked)) == len(set.union(*asked)), "no repeat asks for another's adapters"
    ranks = {adapter.name: adapter.rank for adapter in workload.adapters}
    for main in mains[1:]:  # the same but for their names
        assert [replace(r, adapter=None) for r in main] == [replace(r, adapter=None) for r in mains[0]]
        assert len(set(zip(main_names(main), main_names(mains[0]), strict=True))) == len(asked[0])
        assert [ranks[n] for n in main_names(main)] == [ranks[n] for n in main_names(mains[0])]


def main_names(requests: Sequence[Request]) -> list[str]:
    return [str(request.adapter) for request in requests]


@pytest.mark.parametrize("adapters", [0, 1, 10])
def test_s_lora_asks_again_where_there_are_no_others(adapters: int) -> None:
    workload = workloads.build("s-lora", adapters=adapters, repeats=3)
    for rounds in workload.repeats:
        assert len({r.adapter for r in rounds[MAIN]}) == max(1, adapters)


def test_chameleon_mixes_ranks_evenly_by_power_law() -> None:
    workload = workloads.build("chameleon", rate=20, duration_s=200, max_tokens=16)
    rank_of = {adapter.name: adapter.rank for adapter in workload.adapters}
    ranks = Counter(rank_of[name] for name in rank_of if name != workloads.WARM_UP)
    assert ranks == {8: 20, 16: 20, 32: 20, 64: 20, 128: 20}
    requests = Counter(str(r.adapter) for r in workload.repeats[0][MAIN])
    by_rank = {rank: [n for name, n in requests.most_common() if rank_of[name] == rank] for rank in ranks}
    assert all(sum(counts) == pytest.approx(requests.total() / 5, rel=0.15) for counts in by_rank.values())
    # k^−1: the first of a rank is asked twice as often as the second.
    first, second = (sum(counts[k] for counts in by_rank.values()) for k in (0, 1))
    assert first / second == pytest.approx(2, rel=0.2)


def test_slot_thrash_has_more_adapters_than_places_and_base_requests() -> None:
    workload = workloads.build("slot-thrash", duration_s=60)
    requests = workload.repeats[0][MAIN]
    assert workload.max_resident == 8 and len({r.adapter for r in requests} - {None}) == 16
    assert sum(r.adapter is None for r in requests) == pytest.approx(len(requests) / 4, abs=1)


def test_cold_storm_is_cold_in_every_repeat() -> None:
    workload = workloads.build("cold-storm", adapters=5, repeats=2)
    storms = [{r.adapter for r in rounds[MAIN] if r.tenant == workloads.STORM} for rounds in workload.repeats]
    assert all(len(storm) == 5 for storm in storms) and not storms[0] & storms[1]
    for rounds in workload.repeats:
        assert set(rounds[workloads.QUIET]) == {r for r in rounds[MAIN] if r.tenant == workloads.STEADY}
        assert rounds[workloads.WARM] == rounds[MAIN]


def test_two_tenants_flood_and_calm() -> None:
    tenants = Counter(r.tenant for r in main_of("two-tenants", requests=40))
    assert tenants == {workloads.FLOOD: 30, workloads.CALM: 10}
    base = main_of("two-tenants", requests=40, adapters=0)
    assert {r.adapter for r in base} == {None}


@pytest.mark.parametrize(
    ("name", "sizes", "says"),
    [
        ("nothing", {}, "workload: 'nothing'"),
        ("flat", {"rate": 2.0}, "rate: has no meaning for workload flat"),
        ("flat", {"requests": 0}, "requests: must be positive"),
        ("s-lora", {"cv": -1.0}, "cv: must be positive"),
        ("flat", {"repeats": 0}, "repeats: must be positive"),
    ],
)
def test_what_means_nothing_is_refused_by_name(name: str, sizes: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        workloads.build(name, **sizes)
