"""What the scheduler promises to each request, one property a test: bounds on waiting, fairness between tenants, limits."""

from __future__ import annotations

import math

import pytest

from model_server.request import Finish
from model_server.scheduler import Limits
from tests.simulation.world import User, World, ref


def finished(user: User) -> float:
    assert user.ended is not None and user.ended.finish is Finish.LENGTH
    assert user.ended_s is not None
    return user.ended_s


def test_decodes_are_not_stalled_by_a_long_prompt() -> None:
    """A step never computes more than max_prefill_tokens of prompts beside its decodes."""
    world = World(num_pages=256, max_prefill_tokens=16)
    steady = world.submit(4, 60)
    for _ in range(5):
        world.step()
    world.submit(800, 2)
    seen = len(steady.tokens)
    while len(steady.tokens) < 60:
        world.step()
        assert len(steady.tokens) == seen + 1, "a step without the decode"
        seen += 1
    world.run()
    assert world.runner.max_step_tokens <= 16 + 2
    world.check_answers()


def test_high_priority_takes_the_only_seat_and_low_still_ends() -> None:
    """SCH-05."""
    world = World(max_running=1, ageing_s=1000)
    low = world.submit(4, 50, priority=0)
    for _ in range(10):
        world.step()
    high = world.submit(4, 5, priority=2)
    world.run()
    assert finished(high) < finished(low)
    assert high.started_s is not None and high.started_s - high.submitted_s < 0.1
    assert low.ended is not None and low.ended.num_preemptions == 1
    world.check_answers()


def test_equal_priorities_never_preempt_for_a_seat() -> None:
    world = World(max_running=1)
    users = [world.submit(4, 20), world.submit(4, 20)]
    world.run()
    assert world.engine.scheduler.num_preemptions == 0
    assert finished(users[0]) < finished(users[1])


def test_low_priority_ages_past_endless_high_traffic() -> None:
    world = World(max_running=1, ageing_s=1.0)
    low = world.submit(4, 4, priority=0)

    def more() -> None:
        if low.ended is None:
            world.submit(4, 8, priority=2)
            world.at(world.clock.now_s + 0.05, more)

    more()
    while low.ended is None:
        assert world.step()
    # Two classes up after 2 × ageing; then it is the oldest of its class, and no longer preempted.
    assert finished(low) < 3.0


def test_a_rare_adapter_starts_within_the_bypass_bound() -> None:
    """SCH-09: one adapter at a time fits, an endless stream asks for the popular one."""
    world = World(max_adapters=1, rank_rows=8, ranks={"a": 8, "b": 8}, max_bypass=3, max_running=4)
    popular = [world.submit(4, 10, adapter="a") for _ in range(4)]
    world.run()
    assert all(finished(user) for user in popular)
    rare = world.submit(4, 4, adapter="b")
    admitted_before: list[User] = []

    def more() -> None:
        if rare.started_s is None:
            admitted_before.append(world.submit(4, 10, adapter="a"))
            world.at(world.clock.now_s + 0.02, more)

    more()
    while rare.started_s is None:
        assert world.step()
    # Those running when its weights came, those admitted while it was parked, and max_bypass more.
    ready_s = rare.submitted_s + 2 * world.fetch_s
    assert sum(user.started_s is not None and user.started_s > ready_s for user in admitted_before) <= 3
    world.run()
    world.check_answers()


def test_a_big_request_is_passed_by_small_ones_but_not_for_ever() -> None:
    """SCH-11."""
    world = World(num_pages=20, page_size=4, max_bypass=5, max_running=8)
    first = world.submit(20, 30)
    for _ in range(3):
        world.step()
    big = world.submit(60, 10)
    small = [world.submit(4, 4) for _ in range(50)]
    world.run()
    passed = [user for user in small if user.started_s < big.started_s]
    assert 1 <= len(passed) <= 5
    assert finished(first) and finished(big)
    world.check_answers()


def test_tenants_share_by_tokens_while_one_floods() -> None:
    """Service between two busy tenants differs by at most what one batch of either holds."""
    world = World(max_running=4, num_pages=256)
    flood = [world.submit(16, 16, tenant="flood") for _ in range(60)]
    polite = [world.submit(16, 16, tenant="polite") for _ in range(15)]
    queue = world.engine.scheduler.waiting
    worst = 0.0
    while any(user.ended is None for user in polite):
        world.step()
        if any(user.started_s is None for user in polite):
            worst = max(worst, abs(queue.service_of("flood") - queue.service_of("polite")))
    one_request = 16 + 2 * 16
    assert worst <= 4 * one_request
    # Not all of the flood was served before the polite tenant, which came last.
    assert sum(user.ended is None for user in flood) >= 60 - 15 - 4
    world.run()
    world.check_answers()


def test_idleness_earns_no_credit() -> None:
    world = World(max_running=2, num_pages=256)
    for _ in range(20):
        world.submit(16, 16, tenant="busy")
    for _ in range(100):
        world.step()
    late = [world.submit(16, 16, tenant="late") for _ in range(20)]
    waiting = [user for user in world.users.values() if user.tenant == "busy" and user.started_s is None]
    assert waiting
    world.run()
    order = sorted((user.started_s, user.tenant) for user in [*late, *waiting])
    first = [tenant for _, tenant in order[:8]]
    assert 2 <= first.count("late") <= 6, "who comes late shares, and does not take everything"


def test_the_last_page_is_not_fought_over() -> None:
    """SCH-03: a request that fills the whole pool runs alone to its end, without preempting itself."""
    world = World(num_pages=16, page_size=4, prefix_cache=False)
    whole = world.submit(40, 24)
    other = world.submit(10, 20)
    world.run()
    assert finished(whole) and finished(other)
    assert whole.ended is not None and whole.ended.num_preemptions == 0
    world.check_answers()


def test_limits_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="max_batch_tokens"):
        Limits(page_size=4, max_batch_tokens=4, max_running=8)
    with pytest.raises(ValueError, match="max_prefill_tokens"):
        Limits(page_size=4, max_prefill_tokens=0)
    for slowdown in (0.9, math.inf, math.nan):
        with pytest.raises(ValueError, match="max_slowdown"):
            Limits(page_size=4, max_slowdown=slowdown)


def test_a_cold_adapter_stalls_only_its_own_requests() -> None:
    world = World(ranks={"cold": 4}, fetch_s=5.0)
    warm = world.submit(4, 20)
    cold = world.submit(4, 4, adapter="cold")
    world.run()
    assert finished(warm) < 1.0 < finished(cold)
    assert cold.ended is not None and cold.ended.adapter_load_s >= 5.0


def test_a_burst_for_one_cold_adapter_loads_it_once() -> None:
    world = World(ranks={"cold": 4})
    users = [world.submit(4, 4, adapter="cold") for _ in range(20)]
    world.run()
    assert all(finished(user) for user in users)
    assert sum(world.num_loads.values()) == 1


def test_cancelling_everything_at_any_step_leaves_nothing() -> None:
    for step in range(12):
        world = World(ranks={"a": 4, "b": 8}, seed=step)
        users = [world.submit(9, 12, adapter=name) for name in (None, "a", "b", "a")]
        for _ in range(step):
            world.step()
        for user in users:
            if user.ended is None:
                world.cancel(user)
        assert not world.engine.scheduler.has_work
        world.run()
        world.check_answers()
        assert all(user.ended is not None for user in users)


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    world = World(ranks={"cold": 4}, fetch_s=5.0, max_running=1)
    running = world.submit(4, 200, deadline_s=0.5)
    waiting = world.submit(4, 4, deadline_s=0.3)
    parked = world.submit(4, 4, adapter="cold", deadline_s=0.4)
    expired = world.submit(4, 4, deadline_s=-1.0)
    world.run()
    for user, latest_s in ((running, 0.52), (waiting, 0.32), (parked, 0.42), (expired, 0.02)):
        assert user.ended is not None and user.ended.finish is Finish.DEADLINE
        assert user.ended_s is not None and user.ended_s <= latest_s
    assert not expired.tokens and not waiting.tokens
    world.check_answers()


def test_nobody_is_preempted_for_a_request_that_still_would_not_fit() -> None:
    world = World(num_pages=40, page_size=4, ageing_s=1000, prefix_cache=False)
    world.submit(80, 12, priority=2)  # comes to hold 23 pages
    low = [world.submit(8, 12, priority=0) for _ in range(3)]
    for _ in range(8):
        world.step()
    high = world.submit(78, 2, priority=2)  # needs 20
    world.run()
    assert all(user.ended is not None and user.ended.num_preemptions == 0 for user in low)
    assert finished(high)
    world.check_answers()


def test_cold_adapters_come_in_as_host_memory_takes_them() -> None:
    """Many cold adapters at once hold at most the limit and those on their way; all are served in the end."""
    names = {f"a{i}": 8 for i in range(40)}
    world = World(ranks=names, rank_rows=16, max_adapters=2, host_bytes_limit=2400, num_pages=256)
    users = [world.submit(4, 6, adapter=name) for name in names]
    bank, most = world.engine.scheduler.bank, 0
    while world.step():
        most = max(most, sum(adapter.num_bytes for adapter in bank.host.values()))
    assert all(finished(user) for user in users)
    assert most <= 2400 + (8 + 2) * 800  # each is 800 bytes; 8 may be on their way, 2 are resident
    world.check_answers()


def test_memory_given_back_by_the_last_request_wakes_who_waits_for_it() -> None:
    """Host memory is full while one runs; when it ends nothing else will happen, and the next adapter must be asked for."""
    world = World(ranks={"first": 8, "second": 8}, rank_rows=8, max_adapters=1, host_bytes_limit=100)
    first = world.submit(4, 6, adapter="first")
    while not first.tokens:
        world.step()
    second = world.submit(4, 6, adapter="second")
    world.run()
    assert finished(first) and finished(second)
    world.check_answers()


def test_a_cold_adapter_does_not_wait_for_ever_behind_warm_ones() -> None:
    """Requests with adapters that fill host memory keep coming; a cold one is let in past the limit after `ageing_s`."""
    world = World(ranks={"warm": 8, "cold": 8}, rank_rows=16, max_adapters=2, host_bytes_limit=100, ageing_s=1.0)
    warm = [world.submit(4, 40, adapter="warm")]
    for index in range(400):
        world.at(0.3 + index / 100, lambda: warm.append(world.submit(4, 40, adapter="warm")))
    world.at(0.5, lambda: cold.append(world.submit(4, 6, adapter="cold")))
    cold: list[User] = []
    while not (cold and cold[0].ended):
        assert world.step()
    assert finished(cold[0]) < 3.0, "the warm ones go on coming until 4.3"


def test_the_free_slot_rotates_beside_a_pinned_adapter() -> None:
    """Two places, one pinned: base traffic needs none, and two adapters take turns in the other."""
    world = World(max_adapters=2, rank_rows=16, max_rank=8, ranks={"kept": 8, "b": 8, "c": 8})
    key = world.pin("kept")
    users = [world.submit(4, 12, adapter=name) for name in (None, "b", "c", "b", None, "c", "b", "kept")]
    world.run()
    assert world.pin_answers == {key: None}
    assert all(finished(user) for user in users)
    assert ref("kept") in world.engine.scheduler.bank.resident
    assert world.num_loads[ref("kept")] == 1
    world.check_answers()


def test_a_pin_needs_no_request_to_end() -> None:
    """Running requests whose adapters stand in the way are preempted, the least important first, and still right."""
    world = World(max_adapters=2, rank_rows=16, max_rank=8, ranks={"a": 8, "b": 8, "late": 8}, ageing_s=1000)
    first, second = world.submit(4, 100, adapter="a", priority=2), world.submit(4, 100, adapter="b")
    while not (first.tokens and second.tokens):
        world.step()
    key = world.pin("late")
    while key not in world.pin_answers:
        world.step()
    assert world.pin_answers[key] is None
    assert first.ended is None and second.ended is None
    world.run()
    assert first.ended is not None and first.ended.num_preemptions == 0
    assert second.ended is not None and second.ended.num_preemptions == 1
    assert finished(first) < finished(second)
    world.check_answers()


def test_a_pin_that_leaves_no_room_is_refused_and_nothing_changes() -> None:
    world = World(max_adapters=3, rank_rows=20, max_rank=12, ranks={"small": 8, "large": 9, "other": 1, "third": 1})

    def pin(name: str) -> str | None:
        key = world.pin(name)
        world.run()
        failure = world.pin_answers[key]
        return failure and failure.code

    refused = "RESOURCE_EXHAUSTED"
    assert [pin(name) for name in ("large", "small", "other", "small")] == [refused, None, refused, None]
    world.unpin("small")
    # Now it is places that run out, before rows do.
    assert [pin(name) for name in ("other", "third", "small")] == [None, None, refused]
    world.check_answers()


def test_unpinned_while_it_loads() -> None:
    world = World(ranks={"a": 4}, max_rank=4)
    first = world.pin("a")
    world.unpin("a")
    second = world.pin("a")
    world.run()
    failure = world.pin_answers[first]
    assert failure is not None and failure.code == "ABORTED"
    assert world.pin_answers[second] is None
    world.unpin("a")
    world.unpin("a")
    world.check_answers()


def test_a_broken_adapter_is_not_pinned() -> None:
    world = World(ranks={"a": 4}, max_rank=4, broken=frozenset({"bad"}))
    key = world.pin("bad")
    world.run()
    failure = world.pin_answers[key]
    assert failure is not None and failure.code == "FAILED_PRECONDITION"
    world.check_answers()


def _rotation(prefetch: bool) -> tuple[World, list[User]]:
    """Three adapters in turn, in places for two, one request at a time. All are in host memory."""
    world = World(
        max_adapters=2, rank_rows=16, max_rank=8, ranks=dict.fromkeys("abc", 8), max_running=1, prefetch=prefetch
    )
    for name in "abc":
        world.submit(4, 1, adapter=name)
    world.run()
    users = [world.submit(4, 8, adapter=name) for name in "abcabcabc"]
    world.run()
    world.check_answers()
    return world, users


def test_loading_ahead_takes_loads_out_of_the_way() -> None:
    world, users = _rotation(prefetch=True)
    assert world.num_prefetches >= 7
    plain, same = _rotation(prefetch=False)
    assert plain.num_prefetches == 0
    ahead_s, plain_s = (max(finished(user) for user in those) for those in (users, same))
    assert ahead_s <= plain_s - 6 * 0.002, "each load saved takes two milliseconds"


def test_nothing_is_loaded_ahead_where_those_in_front_need_every_row() -> None:
    world = World(
        max_adapters=2, rank_rows=16, max_rank=16, ranks={"a": 8, "big": 16, "c": 8}, max_running=2, prefetch=True
    )
    for name in ("c", "big", "a"):
        world.submit(4, 1, adapter=name)
        world.run()
    running = world.submit(4, 40, adapter="a")
    world.step()
    before = world.num_prefetches
    users = [world.submit(4, 4, adapter=name) for name in ("big", "c")]
    while running.ended is None:
        world.step()
    # "big" fits beside nothing; "c" would, but is admitted past it when its turn comes, not loaded ahead of it.
    assert world.num_prefetches == before
    world.run()
    assert all(finished(user) for user in users)
    world.check_answers()


def test_a_burst_of_one_adapter_is_loaded_ahead_once() -> None:
    world = World(ranks={"a": 4, "b": 4}, max_adapters=2, max_rank=4, max_running=1, prefetch=True)
    for name in "ab":
        world.submit(4, 1, adapter=name)
    world.run()
    before = world.num_prefetches
    users = [world.submit(4, 6, adapter=name) for name in "abbbb"]
    world.run()
    assert world.num_prefetches - before <= 1
    assert all(finished(user) for user in users)
    world.check_answers()


def test_who_gives_nothing_that_is_needed_is_not_preempted() -> None:
    """Rank rows are what is missing: of those less important only who holds them gives way, in whatever order they came."""
    world = World(ranks={"held": 8, "wanted": 8}, rank_rows=8, max_adapters=1, num_pages=512, ageing_s=1000)
    base = [world.submit(4, 200, priority=0) for _ in range(3)]
    holder = world.submit(4, 200, adapter="held", priority=0)
    base += [world.submit(4, 200, priority=0) for _ in range(3)]
    while not holder.tokens:
        world.step()
    urgent = world.submit(4, 6, adapter="wanted", priority=2)
    world.run()
    assert finished(urgent) < min(finished(user) for user in [*base, holder])
    assert holder.ended is not None and holder.ended.num_preemptions == 1
    assert all(user.ended is not None and user.ended.num_preemptions == 0 for user in base)
    world.check_answers()


def test_a_pin_preempts_nobody_who_gives_nothing() -> None:
    world = World(max_adapters=3, rank_rows=24, max_rank=8, ranks={"a": 8, "b": 2, "late": 8, "c": 8}, ageing_s=1000)
    large = world.submit(4, 100, adapter="a", priority=1)
    other = world.submit(4, 100, adapter="c", priority=2)
    while not (large.tokens and other.tokens):
        world.step()
    small = world.submit(4, 100, adapter="b", priority=0)
    while not small.tokens:
        world.step()
    key = world.pin("late")
    while key not in world.pin_answers:
        world.step()
    world.run()
    # Places are missing, rows are not: the least important one gives its place, and that is enough.
    assert small.ended is not None and small.ended.num_preemptions == 1
    assert large.ended is not None and large.ended.num_preemptions == 0
    world.check_answers()


def test_deadlines_of_requests_that_have_ended_are_forgotten() -> None:
    world = World()
    for _ in range(300):
        world.submit(4, 1, deadline_s=86_400.0)
        world.step()
    assert len(world.engine._deadlines) <= 2 * len(world.engine._requests) + 65
    for user in world.users.values():
        if user.ended is None:
            world.cancel(user)
    world.run()
