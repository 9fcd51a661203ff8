"""Which replica gets a request: the ready one with the fewest outstanding requests. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.request import AdapterRef, Request


@dataclass(slots=True, eq=False)
class ReplicaLoad:
    """What the router knows of one replica."""

    address: str
    max_outstanding: int
    ready: bool = False
    outstanding: int = 0
    resident: frozenset[AdapterRef] = frozenset()
    last_used: int = 0  # turn of the last request it was given
    last_ready_s: float = -math.inf  # when it stopped being ready


def choose(replicas: Iterable[ReplicaLoad], request: Request) -> ReplicaLoad | None:
    """Fewest outstanding, then one that holds the adapter, then the least recently used; None where none has room."""
    candidates = [replica for replica in eligible(replicas, request) if replica.outstanding < replica.max_outstanding]
    return min(
        candidates,
        key=lambda replica: (replica.outstanding, request.adapter not in replica.resident, replica.last_used),
        default=None,
    )


def eligible(replicas: Iterable[ReplicaLoad], request: Request) -> list[ReplicaLoad]:
    """Those that may serve `request` once they have room."""
    return [replica for replica in replicas if replica.ready and replica.address not in request.tried]


def last_ready_s(replicas: Iterable[ReplicaLoad], request: Request, now_s: float) -> float:
    """When a replica that may serve `request` was last ready: `now_s` while one is, -inf where none ever was."""
    untried = [replica for replica in replicas if replica.address not in request.tried]
    return max((now_s if replica.ready else replica.last_ready_s for replica in untried), default=-math.inf)
