"""How far prompts may slow the decodes beside them: other tenants' little, their own as the batch fills; nobody for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from model_server.request import Finish
from tests.simulation.world import User, World


def finished(user: User) -> float:
    assert user.ended is not None and user.ended.finish is Finish.LENGTH
    assert user.ended_s is not None
    return user.ended_s


def gaps_beside(world: World, steady: list[User], newcomers: Callable[[], None]) -> float:
    """The longest time between two tokens of `steady` once `newcomers` have come, as a multiple of what it was before."""
    longest = {True: 0.0, False: 0.0}
    for came in (False, True):
        if came:
            newcomers()
        for _ in range(20):
            before_s = world.clock.now_s
            tokens = sum(len(user.tokens) for user in steady)
            world.step()
            assert sum(len(user.tokens) for user in steady) == tokens + len(steady), "a step without their decodes"
            longest[came] = max(longest[came], world.clock.now_s - before_s)
    return longest[True] / longest[False]


def decoding(world: World, count: int = 4, **user: Any) -> list[User]:
    """Requests that have their first tokens and long to go, and a machine whose pace is known."""
    steady = [world.submit(4, 200, **user) for _ in range(count)]
    while not all(len(user.tokens) > 8 for user in steady):
        world.step()
    return steady


def test_a_tenants_prompts_slow_others_by_max_slowdown_only() -> None:
    world = World(num_pages=2048, max_prefill_tokens=64, max_batch_tokens=128, max_slowdown=1.5)
    steady = decoding(world, tenant="calm")
    crowd: list[User] = []
    slower = gaps_beside(world, steady, lambda: crowd.extend(world.submit(50, 3, tenant="crowd") for _ in range(6)))
    # Of the crowd's decodes, a few rows on top.
    assert 1.2 < slower <= 1.6
    world.run()
    assert all(finished(user) for user in crowd)
    world.check_answers()


def test_copying_adapters_counts_as_slowing_down() -> None:
    names = {f"a{index}": 2 for index in range(8)}
    world = World(
        num_pages=2048, max_adapters=8, max_prefill_tokens=64, max_batch_tokens=128, max_slowdown=1.5, ranks=names,
        fetch_s=0.001,
    )  # fmt: skip
    steady = decoding(world, tenant="calm")

    def storm() -> None:
        for name in names:
            world.submit(8, 1, tenant="storm", adapter=name)

    assert 1.3 < gaps_beside(world, steady, storm) <= 1.6, "a step with two copies"
    world.run()
    world.check_answers()


def test_a_tenants_prompts_slow_its_own_decodes_as_the_batch_fills() -> None:
    world = World(num_pages=2048, max_prefill_tokens=64, max_batch_tokens=128, max_slowdown=1.5)
    steady = decoding(world, tenant="one")
    crowd: list[User] = []
    slower = gaps_beside(world, steady, lambda: crowd.extend(world.submit(50, 3, tenant="one") for _ in range(6)))
    assert slower > 3, "the batch filled no faster than beside strangers"
    assert world.runner.max_step_tokens <= 64 + 6


def test_the_more_important_are_not_held_back_by_the_less_important() -> None:
    world = World(num_pages=2048, max_prefill_tokens=64, max_batch_tokens=128, max_slowdown=1.0, ageing_s=1000)
    decoding(world, tenant="batch", priority=0)
    urgent = world.submit(60, 2, tenant="person", priority=2)
    for _ in range(2):
        world.step()
    assert urgent.tokens, "its prompt of one step took more"


@pytest.mark.parametrize("prompt", [500, 1500])
@pytest.mark.parametrize("crowd_priority", [0, 1])
def test_a_light_tenant_is_not_starved_by_a_crowd(prompt: int, crowd_priority: int) -> None:
    """The crowd's prompts may slow its own decodes, the light one's only a little: that must not make it wait for them."""
    world = World(num_pages=16384, max_batch_tokens=320, max_prefill_tokens=256, max_running=32, ageing_s=1000)
    for _ in range(60):
        world.submit(prompt, 60, tenant="crowd", priority=crowd_priority)
    while not any(len(user.tokens) > 5 for user in world.users.values()):
        world.step()
    light = world.submit(20, 5, tenant="light")
    started = len([user for user in world.users.values() if user.started_s is not None])
    while not light.tokens:
        world.step()
    passed = len([user for user in world.users.values() if user.started_s is not None]) - started - 1
    # A crowd's chunk that was begun, its own three chunks, and who started meanwhile.
    assert world.clock.now_s - light.submitted_s < 1.5
    assert passed <= 4
    world.run()
    world.check_answers()


def crowded(num_strangers: int, prompt: int, **limits: Any) -> tuple[World, list[User]]:
    """Tenant "crowd" decodes for long; so many others come, each with such a prompt."""
    world = World(num_pages=16384, max_prefill_tokens=64, max_batch_tokens=128, max_running=64, **limits)
    for _ in range(2):
        world.submit(4, 3000, tenant="crowd")
    world.step()
    strangers = [world.submit(prompt, 2, tenant=f"stranger{index}") for index in range(num_strangers)]
    world.step()
    return world, strangers


def test_a_crowds_newcomers_do_not_wait_for_strangers_that_its_decodes_hold_back() -> None:
    world, strangers = crowded(12, 2000, ageing_s=1000, max_bypass=3)
    newcomers: list[User] = []
    for _ in range(30):
        newcomers.append(world.submit(8, 2, tenant="crowd"))
        for _ in range(5):
            world.step()
    waits = [user.started_s - user.submitted_s for user in newcomers[:-1] if user.started_s is not None]
    assert len(waits) == 29 and max(waits) < 0.1
    assert not any(user.tokens for user in strangers)
    world.run()
    ends = sorted(finished(user) for user in strangers)
    assert ends[0] < ends[-1] / 2, "all crawled, none got done"
    world.check_answers()


def test_a_short_prompt_does_not_wait_for_a_strangers_long_one() -> None:
    world, _ = crowded(1, 4000, ageing_s=1000)
    short = world.submit(8, 2, tenant="short")
    before_s = world.clock.now_s
    while not short.tokens:
        assert world.step()
    assert world.clock.now_s - before_s < 0.2
    world.run()
    world.check_answers()


def test_nobody_is_held_back_for_longer_than_ageing() -> None:
    world, strangers = crowded(12, 500, ageing_s=1.0)
    while not all(user.tokens for user in strangers):
        assert world.step()
    # From then on as fast as the machine is: 12 prompts of 500 tokens, 64 a step of 44 ms.
    assert world.clock.now_s < 1.0 + 12 * 500 / 64 * 0.050
    world.run()
    world.check_answers()


@pytest.mark.parametrize("seats", [2, 3, 8])
def test_a_long_prompt_gets_all_that_is_allowed_when_nobody_can_share_it(seats: int) -> None:
    world = World(num_pages=4096, max_prefill_tokens=64, max_batch_tokens=128, max_running=seats, ageing_s=1000)
    world.submit(4, 3000, tenant="crowd")
    world.step()
    long = world.submit(800, 2, tenant="long")
    world.step()
    for _ in range(10):
        world.submit(8, 2000, tenant="crowd")
    steps = 0
    while not long.tokens:
        assert world.step()
        steps += 1
    assert steps <= 800 / 8 + 2


def test_who_is_spared_little_does_not_go_before_the_more_important() -> None:
    world = World(
        num_pages=4096, max_batch_tokens=320, max_prefill_tokens=256, max_running=64, max_slowdown=10.0, ageing_s=1000
    )
    decoding(world, tenant="crowd")
    normal = world.submit(6000, 2, tenant="normal", priority=1)
    world.step()
    urgent = world.submit(3000, 2, tenant="crowd", priority=2)
    steps = 0
    while not urgent.tokens:
        assert world.step()
        steps += 1
    assert steps <= 3000 / 256 + 2 and not normal.tokens


def test_a_decode_grows_no_more_important_by_its_age() -> None:
    world = World(num_pages=4096, max_prefill_tokens=64, max_batch_tokens=128, ageing_s=0.1)
    world.submit(4, 2000, tenant="batch", priority=0)
    for _ in range(100):
        world.step()
    urgent = world.submit(60, 2, tenant="person", priority=2)
    for _ in range(2):
        world.step()
    assert urgent.tokens
