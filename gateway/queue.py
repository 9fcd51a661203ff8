"""Who is next: priority classes, ageing, and fairness in tokens between the tenants of a class.

Between classes the higher goes first, but a request that has waited `promote_after_s` moves one class up, so the lowest
is in the highest after twice that time, ahead of everything of its tenant that arrives later. Within a class the tenant
with the smallest virtual token counter goes first (start-time fair queuing): a request adds its cost to its tenant's
counter when it is taken, and a tenant that was idle starts at the level of the last one served, so it neither saves up
credit nor loses its turn. Within a tenant it is first in, first out.

Beside the classes stand the returned requests: they had their turn and have paid for it, but a replica failed them. They
come before everyone, and because each may go to some replicas only, none of them makes another wait.

Pure: time comes as an argument and must not run backwards.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from gateway.request import Priority, Request


class QueueFullError(Exception):
    """The queue holds as many requests as it may."""


@dataclass(slots=True)
class _Class:
    entered: OrderedDict[Request, float] = field(default_factory=OrderedDict)  # oldest first
    tenants: dict[str, OrderedDict[Request, None]] = field(default_factory=dict)  # only those with requests
    served: dict[str, float] = field(default_factory=dict)  # virtual tokens by tenant
    level: float = 0.0  # the counter of the last tenant served, before it was charged


class RequestQueue:
    def __init__(self, limit: int, promote_after_s: float) -> None:
        """At most `limit` requests wait at once."""
        self._limit = limit
        self._promote_after_s = promote_after_s
        self._classes = {priority: _Class() for priority in Priority}
        self._class_of: dict[Request, Priority] = {}
        self._returned: dict[Request, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._class_of) + len(self._returned)

    @property
    def returned(self) -> tuple[Request, ...]:
        """Requests that were put back, to be taken in this order as far as there is a replica for each."""
        return tuple(self._returned)

    def push(self, request: Request, now_s: float) -> None:
        """Raises QueueFullError at the limit."""
        if len(self) >= self._limit:
            raise QueueFullError
        self._enter(request, request.priority, now_s)

    def put_back(self, request: Request) -> None:
        """Return a request that was taken. Its tenant stays charged, once; the limit does not hold for it, but it counts
        towards the limit for others."""
        self._returned[request] = None

    def peek(self, now_s: float) -> Request | None:
        """The next request but for the returned ones, which stays."""
        self._promote(now_s)
        for priority in sorted(Priority, reverse=True):
            queue = self._classes[priority]
            if queue.tenants:
                tenant = min(queue.tenants, key=lambda name: (queue.served[name], self._head_entered(queue, name)))
                return next(iter(queue.tenants[tenant]))
        return None

    def take(self, request: Request) -> None:
        """Remove a request that `peek` or `returned` gave, and charge its tenant unless that is done."""
        if request in self._returned:
            del self._returned[request]
            return
        request.charged = self._class_of[request]
        queue = self._classes[request.charged]
        queue.level = max(queue.level, queue.served[request.tenant])
        queue.served[request.tenant] += request.cost
        self._leave(request)

    def remove(self, request: Request) -> bool:
        """Drop a request that is no longer wanted; False when it was not waiting."""
        if request in self._returned:
            del self._returned[request]
        elif request in self._class_of:
            self._leave(request)
        else:
            return False
        return True

    def charge(self, request: Request, tokens: int) -> None:
        """Correct by `tokens` what taking `request` charged its tenant, once it is known what it used."""
        if request.charged is not None:
            served = self._classes[request.charged].served
            served[request.tenant] = max(0.0, served[request.tenant] + tokens)

    def check_integrity(self) -> None:
        for priority, queue in self._classes.items():
            by_tenant = {request for requests in queue.tenants.values() for request in requests}
            assert by_tenant == set(queue.entered), f"{priority.name}: tenants and order disagree"
            assert all(queue.tenants.values()), f"{priority.name}: an idle tenant is kept as waiting"
            assert all(self._class_of[request] is priority for request in by_tenant)
            times = list(queue.entered.values())
            assert times == sorted(times), f"{priority.name}: order of entry is broken"
        assert len(self._class_of) == sum(len(queue.entered) for queue in self._classes.values())
        assert not self._returned.keys() & self._class_of.keys(), "a returned request waits twice"
        assert all(request.charged is not None for request in self._returned), "a returned request has not been taken"

    def _head_entered(self, queue: _Class, tenant: str) -> float:
        return queue.entered[next(iter(queue.tenants[tenant]))]

    def _enter(self, request: Request, priority: Priority, now_s: float) -> None:
        queue = self._classes[priority]
        if request.tenant not in queue.tenants:
            queue.tenants[request.tenant] = OrderedDict()
            queue.served[request.tenant] = max(queue.served.get(request.tenant, 0.0), queue.level)
        queue.tenants[request.tenant][request] = None
        queue.entered[request] = now_s
        self._class_of[request] = priority

    def _leave(self, request: Request) -> None:
        queue = self._classes[self._class_of.pop(request)]
        del queue.entered[request]
        waiting = queue.tenants[request.tenant]
        del waiting[request]
        if not waiting:
            del queue.tenants[request.tenant]

    def _promote(self, now_s: float) -> None:
        # From the top down, so that a request moves one class a call at most and waits its time in each.
        for priority in sorted(Priority, reverse=True)[1:]:
            entered = self._classes[priority].entered
            while entered:
                request, since_s = next(iter(entered.items()))
                if now_s - since_s < self._promote_after_s:
                    break
                self._leave(request)
                self._enter(request, Priority(priority + 1), now_s)
