"""How many tokens of prompts one step takes on. Pure.

Sarathi-Serve (Agrawal et al., OSDI 2024) bounds a step's tokens for the sake of the decodes in it; here only decodes of other
tenants are spared. A tenant's newcomers may slow its own as much as `most` lets them: the sooner a batch is full, the more
tokens all get.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from model_server.request import Request

# However few decodes there are, this much is taken on beside them.
_LEAST_TOKENS = 8
# What copying an adapter counts as.
_LOAD_TOKENS = 4


class PrefillBudget:
    """Requests of other tenants, unless more important, together slow a tenant's decodes by `max_slowdown` at most, or by
    _LEAST_TOKENS where that is more. Nobody is held back so for longer than `ageing_s` after it arrived."""

    def __init__(
        self,
        most: int,
        decoding: Collection[Request],
        *,
        max_slowdown: float | None,
        fixed_rows: float,
        ageing_s: float,
    ) -> None:
        """`most` in all; `decoding` are in the step already. The others as in `scheduler.Limits`."""
        self.left = most
        self._ageing_s = ageing_s
        self._beside: dict[str, int] = {}  # tenant that decodes -> what others may still take on
        # And its most important decode, as asked: no decode gets more important by its age.
        self._best: dict[str, int] = {}
        if max_slowdown is None:
            return
        beside = max(_LEAST_TOKENS, int((max_slowdown - 1) * (len(decoding) + fixed_rows)))
        for request in decoding:
            self._beside[request.tenant] = beside
            self._best[request.tenant] = max(request.priority, self._best.get(request.tenant, request.priority))

    def of(self, request: Request, now_s: float) -> int:
        return min([self.left, *(self._beside[tenant] for tenant in self._spared(request, now_s))])

    def spares(self, request: Request, now_s: float) -> bool:
        """Whether others' decodes limit it."""
        return any(True for _ in self._spared(request, now_s))

    def take(self, request: Request, now_s: float, tokens: int, num_loads: int = 0) -> None:
        """Copying an adapter counts beside others only: alone nobody minds."""
        self.left -= tokens
        for tenant in self._spared(request, now_s):
            self._beside[tenant] = max(0, self._beside[tenant] - tokens - _LOAD_TOKENS * num_loads)

    def _spared(self, request: Request, now_s: float) -> Iterator[str]:
        if now_s - request.arrived_s < self._ageing_s:
            yield from (t for t, best in self._best.items() if t != request.tenant and best >= request.priority)
