"""Who is served next: priority classes with ageing, and token-fair sharing between tenants inside a class. Pure.

Fairness is that of the virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): each
tenant's counter grows with the tokens it is given; the waiting tenant with the smallest counter goes first; a tenant that
comes back from idleness starts at the smallest counter among the active ones, so that idleness earns no credit.
"""

from __future__ import annotations

from collections.abc import Iterator

from model_server.request import Request

HIGHEST_PRIORITY = 2
PROMPT_TOKEN_COST = 1
OUTPUT_TOKEN_COST = 2


class WaitingQueue:
    """`ageing_s`: a request rises one class for each such time since it arrived; so LOW waits at most twice that behind
    HIGH traffic."""

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._requests: dict[Request, None] = {}
        self._counters: dict[str, float] = {}
        self._num_active: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        self._requests[request] = None

    def remove(self, request: Request) -> None:
        del self._requests[request]

    def enter(self, tenant: str) -> None:
        """A request of the tenant is in the engine, in whatever state. Paired with `leave`."""
        if not self._num_active.get(tenant):
            active = [self._counters[t] for t in self._num_active]
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), min(active, default=0.0))
            self._num_active[tenant] = 0
        self._num_active[tenant] += 1

    def leave(self, tenant: str) -> None:
        self._num_active[tenant] -= 1
        if not self._num_active[tenant]:
            del self._num_active[tenant]
            # An idle tenant's counter only matters while it exceeds the others'; bound what idle tenants leave behind.
            floor = min((self._counters[t] for t in self._num_active), default=None)
            if floor is None:
                self._counters.clear()
            elif self._counters[tenant] <= floor:
                del self._counters[tenant]

    def charge(self, tenant: str, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        self._counters[tenant] += PROMPT_TOKEN_COST * prompt_tokens + OUTPUT_TOKEN_COST * output_tokens

    def service_of(self, tenant: str) -> float:
        """The tenant's counter, in cost units."""
        return self._counters.get(tenant, 0.0)

    def effective_class(self, request: Request, now_s: float) -> int:
        aged = int((now_s - request.arrived_s) / self._ageing_s) if now_s > request.arrived_s else 0
        return min(HIGHEST_PRIORITY, request.priority + aged)

    def rank(self, request: Request, now_s: float) -> tuple[int, float, float]:
        """Less is served first: class, its tenant's share, arrival."""
        return -self.effective_class(request, now_s), self.service_of(request.tenant), request.arrived_s

    def in_order(self, now_s: float) -> Iterator[Request]:
        """Waiting requests, best first. Charges and removals made while iterating count for what follows."""
        heads: dict[str, list[tuple[int, float, int, Request]]] = {}
        for sequence, request in enumerate(self._requests):
            rank = (-self.effective_class(request, now_s), request.arrived_s, sequence, request)
            heads.setdefault(request.tenant, []).append(rank)
        for ranks in heads.values():
            ranks.sort(reverse=True, key=lambda rank: rank[:3])
        while heads:
            tenant = min(heads, key=lambda t: (heads[t][-1][0], self.service_of(t), heads[t][-1][1], t))
            yield heads[tenant].pop()[3]
            if not heads[tenant]:
                del heads[tenant]
