"""The engine under random load, a thousand seeds: whatever happens around a request, its answer is the one it gets alone."""

from __future__ import annotations

from functools import partial

import pytest

from model_server.request import Finish
from tests.simulation.world import World

SEEDS_PER_CASE = 100
NAMES = [f"a{i}" for i in range(8)]


def _storm(seed: int, num_requests: int = 20) -> World:
    """Arrivals, cancels, deadlines, cold and broken adapters over a pool and a bank that are too small; in a third of the
    seeds an operator pins and unpins at random."""
    pins = seed % 3 == 0
    world = World(
        seed,
        num_pages=24,
        rank_rows=28 if pins else 20,
        max_rank=20,
        max_adapters=3,
        ranks=dict(zip(NAMES, (1, 3, 4, 8, 8, 12, 16, 20), strict=True)),
        broken=frozenset({"a3"}),
        host_bytes_limit=3000,
        prefix_cache=seed % 2 == 0,
        max_prefill_tokens=(1, 3, 7, 32)[seed % 4],
        max_running=(1, 2, 5, 16)[seed // 4 % 4],
        max_bypass=2,
        prefetch=seed // 2 % 2 == 0,
        ageing_s=1.0,
    )
    random = world.random
    shared = [random.randrange(1, 97) for _ in range(24)]

    def arrive() -> None:
        prompt = shared[: random.randrange(1, 24)] + [random.randrange(1, 97) for _ in range(random.randrange(1, 30))]
        user = world.submit(
            prompt,
            random.randrange(1, 30),
            adapter=random.choice([None, *NAMES]),
            tenant=random.choice("xyz"),
            priority=random.randrange(3),
            deadline_s=world.clock.now_s + random.random() * 3 if random.random() < 0.15 else None,
            ignore_eos=random.random() < 0.5,
        )
        if random.random() < 0.15:
            world.at(world.clock.now_s + random.random(), lambda: world.cancel(user))

    for _ in range(num_requests):
        world.at(random.random() * 2, arrive)
    for _ in range(num_requests // 2 if pins else 0):
        operate = random.choice([world.pin, world.pin, world.unpin])
        world.at(random.random() * 2, partial(operate, random.choice(NAMES)))
    world.run()
    return world


@pytest.mark.parametrize("case", range(10))
def test_storm(case: int) -> None:
    for seed in range(case * SEEDS_PER_CASE, (case + 1) * SEEDS_PER_CASE):
        world = _storm(seed)
        world.check_answers()
        for user in world.users.values():
            assert user.ended is not None
            if user.adapter is not None and user.adapter.adapter_id == "a3":
                assert user.ended.finish in (Finish.FAILED, Finish.CANCELLED, Finish.DEADLINE)
                assert not user.tokens
            else:
                assert user.ended.finish is not Finish.FAILED


def test_same_seed_same_trace() -> None:
    assert _storm(7).trace == _storm(7).trace
    assert _storm(7).trace != _storm(8).trace


def test_storms_do_preempt_and_evict() -> None:
    """The storms above would prove little if nothing was ever tight."""
    worlds = [_storm(seed) for seed in range(20)]
    assert sum(w.engine.scheduler.num_preemptions for w in worlds) > 50
    assert sum(w.engine.scheduler.bank.num_evictions for w in worlds) > 20
    assert sum(w.num_prefetches for w in worlds) > 10
    answers = [failure.code if failure else "" for world in worlds for failure in world.pin_answers.values()]
    assert {"", "ABORTED", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"} == set(answers)
    assert sum(w.engine.scheduler.prefix_cache.num_hit_tokens for w in worlds if w.engine.scheduler.prefix_cache) > 100
