"""Order, ageing, fairness and bounds of the queue, on a clock of the test's own."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.queue import QueueFullError, RequestQueue
from gateway.request import Priority, Request

NEVER = 1e9
_ids = itertools.count()


def request(tenant="a", priority=Priority.NORMAL, cost=1):
    return Request(f"r{next(_ids)}", tenant, priority, None, cost)


def filled(*requests, limit=10_000, promote_after_s=NEVER):
    queue = RequestQueue(limit, promote_after_s)
    for item in requests:
        queue.push(item, 0.0)
    return queue


def take(queue, now_s=0.0):
    item = next(iter(queue.returned), None) or queue.peek(now_s)
    if item is not None:
        queue.take(item)
    queue.check_integrity()
    return item


def drain(queue, now_s=0.0):
    return list(iter(lambda: take(queue, now_s), None))


def test_higher_classes_first_and_in_order_of_arrival_within():
    low, normal, high = (
        [request(priority=p) for _ in range(3)] for p in (Priority.LOW, Priority.NORMAL, Priority.HIGH)
    )
    mixed = [item for three in zip(low, normal, high, strict=True) for item in three]
    assert drain(filled(*mixed)) == high + normal + low


def test_full_is_refused_and_a_place_becomes_free():
    first = request()
    queue = filled(first, request(), limit=2)
    with pytest.raises(QueueFullError):
        queue.push(request(), 0.0)
    assert queue.remove(first) and not queue.remove(first)
    queue.push(request(), 0.0)
    assert len(queue) == 2


def test_one_that_is_put_back_comes_first_and_costs_its_tenant_once():
    first, second = request("a", cost=10), request("a", cost=10)
    other, later = request("b", cost=15), request("b", cost=15)
    queue = filled(first, second, other, later)
    assert take(queue) is first
    queue.put_back(first)
    assert queue.returned == (first,) and queue.peek(1.0) is other, "it does not stand in the way"
    assert drain(queue) == [first, other, second, later]


def test_what_is_put_back_counts_towards_the_limit():
    first = request()
    queue = filled(first, limit=2)
    take(queue)
    queue.push(request(), 0.0)
    queue.push(request(), 0.0)
    queue.put_back(first)
    assert len(queue) == 3
    assert queue.remove(first) and not queue.remove(first) and len(queue) == 2
    queue.put_back(first)
    queue.remove(queue.peek(0.0))
    with pytest.raises(QueueFullError):
        queue.push(request(), 0.0)


def test_an_idle_tenant_saves_up_no_credit():
    queue = filled(*(request("busy", cost=10) for _ in range(100)))
    for _ in range(50):
        take(queue)
    for _ in range(50):
        queue.push(request("late", cost=10), 1.0)
    served = Counter(take(queue).tenant for _ in range(40))
    assert abs(served["busy"] - served["late"]) <= 1


def test_what_was_really_used_counts():
    queue = filled(*(request(tenant, cost=10) for tenant in "ab" for _ in range(60)))
    used = Counter()
    for _ in range(60):
        item = take(queue)
        actual = 40 if item.tenant == "a" else 10
        queue.charge(item, actual - item.cost)
        used[item.tenant] += actual
    assert abs(used["a"] - used["b"]) <= 80


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_backlogged_tenants_get_equal_tokens(data):
    """The difference between any two is bounded by the largest requests of both, whatever they ask for."""
    largest = 50
    tenants = "abc"[: data.draw(st.integers(2, 3))]
    costs = {tenant: data.draw(st.lists(st.integers(1, largest), min_size=40, max_size=40)) for tenant in tenants}
    queue = filled(*(request(tenant, cost=cost) for tenant in tenants for cost in costs[tenant]))
    tokens = dict.fromkeys(tenants, 0)
    left = Counter(dict.fromkeys(tenants, 40))
    while all(left.values()):
        item = take(queue)
        tokens[item.tenant] += item.cost
        left[item.tenant] -= 1
        assert max(tokens.values()) - min(tokens.values()) <= 2 * largest


@pytest.mark.parametrize("seed", range(5))
def test_low_is_served_within_a_bound_under_endless_high(seed):
    """One is served each second and one or more HIGH arrive each second: LOW goes after two promotions, behind what its
    own tenant had waiting and one turn of every other tenant."""
    draw = random.Random(seed)
    promote_after_s = 10.0
    queue = RequestQueue(100_000, promote_after_s)
    low = request("slow", Priority.LOW, cost=5)
    queue.push(low, 0.0)
    tenants = [f"t{index}" for index in range(4)]
    for second in range(200):
        for _ in range(draw.choice((1, 1, 2))):
            queue.push(request(draw.choice(tenants), Priority.HIGH, cost=draw.randint(1, 10)), float(second))
        if take(queue, float(second)) is low:
            break
    # Twice the promotion, then at most the largest request of each other tenant twice over.
    assert 2 * promote_after_s <= second <= 2 * promote_after_s + 2 * len(tenants) * 10
    assert queue.peek(second).priority is Priority.HIGH


def test_a_promoted_request_keeps_its_order():
    first, second = request(priority=Priority.LOW), request(priority=Priority.LOW)
    queue = filled(first, second, promote_after_s=5.0)
    queue.push(third := request(priority=Priority.NORMAL), 6.0)
    assert queue.peek(6.0) is third, "promoted behind what its tenant has waiting there"
    queue.remove(third)
    assert drain(queue, 6.0) == [first, second]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["push", "take", "back", "drop"]), st.integers(0, 2**16)), max_size=80))
def test_every_request_leaves_once_whatever_happens(steps):
    queue = RequestQueue(20, promote_after_s=3.0)
    waiting, taken = set(), []
    for now_s, (step, number) in enumerate(steps):
        if step == "push":
            item = request("abc"[number % 3], Priority(number % 3), cost=1 + number % 17)
            try:
                queue.push(item, float(now_s))
                waiting.add(item)
            except QueueFullError:
                assert len(queue) >= 20
        elif step == "take":
            item = take(queue, float(now_s))
            assert (item is None) == (not waiting)
            if item is not None:
                waiting.remove(item)
                taken.append(item)
        elif step == "back" and taken:
            item = taken.pop(number % len(taken))
            queue.put_back(item)
            waiting.add(item)
        elif step == "drop" and waiting:
            item = sorted(waiting, key=lambda request: request.request_id)[number % len(waiting)]
            assert queue.remove(item)
            waiting.remove(item)
        queue.check_integrity()
        assert len(queue) == len(waiting)
    assert set(drain(queue, 1e6)) == waiting
