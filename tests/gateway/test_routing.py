"""Where a request goes, and that load stays even over many."""

import math
import random

import pytest

from gateway.request import AdapterRef, Priority, Request
from gateway.routing import ReplicaLoad, choose, last_ready_s

ALPHA = AdapterRef("alpha", "sha256:1")


def request(adapter=None, tried=()):
    return Request("r", "t", Priority.NORMAL, adapter, 1, set(tried))


def replica(address, outstanding=0, *, ready=True, resident=(), last_used=0, room=8):
    return ReplicaLoad(address, room, ready, outstanding, frozenset(resident), last_used)


def chosen(replicas, item):
    load = choose(replicas, item)
    return load.address if load else None


def test_fewest_outstanding_wins_over_residency():
    assert chosen([replica("a", 1, resident=[ALPHA]), replica("b", 0)], request(ALPHA)) == "b"


def test_of_equals_the_one_with_the_adapter():
    replicas = [replica("a", 1), replica("b", 1, resident=[ALPHA], last_used=9)]
    assert chosen(replicas, request(ALPHA)) == "b"
    assert chosen(replicas, request(AdapterRef("alpha", "sha256:2"))) == "a", "another revision is another adapter"


def test_of_those_the_least_recently_used():
    assert chosen([replica("a", last_used=3), replica("b", last_used=1), replica("c", last_used=2)], request()) == "b"


def test_never_full_unready_or_tried_ones():
    replicas = [replica("full", 8, room=8), replica("down", ready=False), replica("tried")]
    assert chosen(replicas, request(tried=["tried"])) is None
    assert chosen([], request()) is None


@pytest.mark.parametrize("seed", range(3))
def test_load_stays_even(seed):
    """Random arrivals and departures: when one arrives, no ready replica with room has less than the chosen one."""
    draw = random.Random(seed)
    replicas = [replica(f"r{index}", room=50) for index in range(5)]
    given = dict.fromkeys((load.address for load in replicas), 0)
    for turn in range(3000):
        busy = [load for load in replicas if load.outstanding]
        if busy and draw.random() < 0.48:
            draw.choice(busy).outstanding -= 1
            continue
        load = choose(replicas, request())
        assert load.outstanding == min(other.outstanding for other in replicas)
        load.outstanding += 1
        load.last_used = turn
        given[load.address] += 1
    assert max(given.values()) - min(given.values()) < 0.1 * sum(given.values())


def test_when_a_replica_for_it_was_last_ready():
    a, b = replica("a"), replica("b", ready=False)
    assert last_ready_s([a, b], request(), 9.0) == 9.0
    assert last_ready_s([a, b], request(tried="a"), 9.0) == -math.inf, "never ready"
    b.last_ready_s = 4.0
    assert last_ready_s([a, b], request(tried="a"), 9.0) == 4.0
    assert last_ready_s([a, b], request(tried="ab"), 9.0) == -math.inf
