"""Gives waiting requests to replicas with room: the queue says who is next, routing says where."""

from __future__ import annotations

import asyncio
import time

from gateway.queue import QueueFullError, RequestQueue
from gateway.replicas import Replica, Replicas
from gateway.request import Request
from gateway.routing import choose, eligible, last_ready_s
from observability.metrics import GatewayMetrics
from protos.errors import deadline_exceeded, resource_exhausted, unavailable

_RETRY_AFTER_S = 1.0


class Dispatcher:
    """One per gateway, on its event loop. A place got with `place` is given back with `release`."""

    def __init__(self, queue: RequestQueue, replicas: Replicas, replica_wait_s: float, metrics: GatewayMetrics) -> None:
        self._queue = queue
        self._replicas = replicas
        self._replica_wait_s = replica_wait_s
        self._metrics = metrics
        self._waiting: dict[Request, asyncio.Future[Replica]] = {}
        self._turn = 0
        replicas.on_change = self._dispatch

    async def place(self, request: Request, deadline_s: float | None) -> Replica:
        """Wait for a turn and a place on a replica. `deadline_s` is monotonic time.

        A request that replicas have failed (`tried`) had its turn and goes before all that have not. Raises
        RESOURCE_EXHAUSTED when the queue is full, DEADLINE_EXCEEDED in phase "queue", UNAVAILABLE when no replica that
        may serve it is ready for too long.
        """
        entered_s = time.monotonic()
        if request.tried:
            self._queue.put_back(request)
        else:
            try:
                self._queue.push(request, entered_s)
            except QueueFullError:
                description = f"the gateway's queue is full: {len(self._queue)} requests wait"
                raise resource_exhausted("gateway.queue", description, _RETRY_AFTER_S) from None
        placed: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        self._waiting[request] = placed
        self._metrics.waiting(1, request.priority.name)
        try:
            self._dispatch()
            await self._until_placed(request, placed, entered_s, deadline_s)
        except BaseException:
            if placed.done():  # placed in the same moment as it was given up
                self.release(placed.result())
            raise
        finally:
            self._queue.remove(request)
            del self._waiting[request]
            self._metrics.waiting(-1, request.priority.name)
            self._metrics.left_queue(time.monotonic() - entered_s, request.priority.name)
        return placed.result()

    def release(self, replica: Replica) -> None:
        replica.load.outstanding -= 1
        self._metrics.outstanding(-1, replica.load.address)
        self._dispatch()

    def settle(self, request: Request, used_tokens: int) -> None:
        """Charge the tenant for what the request used instead of what it was expected to; once, when it has ended."""
        self._queue.charge(request, used_tokens - request.cost)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def has_untried(self, request: Request) -> bool:
        return bool(eligible(self._replicas.loads, request))

    def check_integrity(self) -> None:
        self._queue.check_integrity()
        assert len(self._waiting) == len(self._queue), "queue and waiting room disagree"
        assert all(0 <= load.outstanding <= load.max_outstanding for load in self._replicas.loads)

    async def _until_placed(
        self, request: Request, placed: asyncio.Future[Replica], entered_s: float, deadline_s: float | None
    ) -> None:
        while not placed.done():
            now_s = time.monotonic()
            if deadline_s is not None and now_s >= deadline_s:
                raise deadline_exceeded("queue")
            ready_s = last_ready_s(self._replicas.loads, request, now_s)
            give_up_s = max(entered_s, ready_s) + self._replica_wait_s
            if now_s >= give_up_s:
                raise unavailable("no model server is ready", _RETRY_AFTER_S)
            until_s = give_up_s if deadline_s is None else min(give_up_s, deadline_s)
            await asyncio.wait([placed], timeout=until_s - now_s)

    def _dispatch(self) -> None:
        """Place whom there is room for: each returned request that has a replica, then the queue in its order."""
        for request in self._queue.returned:
            self._try_to_place(request)
        while (head := self._queue.peek(time.monotonic())) is not None:
            # None of the queue has been tried anywhere: where there is no room for the first there is none for any.
            if not self._try_to_place(head):
                return

    def _try_to_place(self, request: Request) -> bool:
        load = choose(self._replicas.loads, request)
        if load is None:
            return False
        self._queue.take(request)
        self._turn += 1
        load.last_used = self._turn
        load.outstanding += 1
        self._metrics.outstanding(1, load.address)
        self._waiting[request].set_result(self._replicas[load.address])
        return True
