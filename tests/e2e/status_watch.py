"""The model server's own books, as its status stream tells them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self

from protos import model_server_pb2, model_server_pb2_grpc, serving

Status = model_server_pb2.ReplicaStatus

# For whatever a loaded machine may take; nothing here waits that long unless it fails.
PATIENCE_S = 120.0


class StatusWatch:
    """`async with StatusWatch(address) as watch`: every status since then, in `seen`."""

    def __init__(self, address: str) -> None:
        self._channel = serving.channel(address)
        self._changed = asyncio.Condition()
        self._over = False
        self.seen: list[Status] = []

    @property
    def latest(self) -> Status:
        return self.seen[-1]

    async def until(self, condition: Callable[[Status], bool]) -> Status:
        """The first status that meets `condition`, from the latest one on."""
        index = max(0, len(self.seen) - 1)
        async with asyncio.timeout(PATIENCE_S), self._changed:
            while True:
                for status in self.seen[index:]:
                    if condition(status):
                        return status
                index = len(self.seen)
                assert not self._over, "the model server ended its status stream"
                await self._changed.wait()

    async def until_idle(self) -> Status:
        """The first status in which no request is left and every page is free."""
        return await self.until(at_rest)

    async def __aenter__(self) -> Self:
        call: Any = model_server_pb2_grpc.ModelServerStub(self._channel).WatchStatus(
            model_server_pb2.WatchStatusRequest()
        )
        self._reading = asyncio.create_task(self._read(call))
        await self.until(lambda _: True)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reading.cancel()
        await asyncio.wait([self._reading])
        await self._channel.close()

    async def _read(self, call: Any) -> None:
        try:
            async for status in call:
                async with self._changed:
                    self.seen.append(status)
                    self._changed.notify_all()
        finally:
            call.cancel()
            self._over = True
            async with self._changed:
                self._changed.notify_all()


def at_rest(status: Status) -> bool:
    requests = status.running + status.waiting + status.parked
    return requests == 0 and status.free_pages == status.num_pages
