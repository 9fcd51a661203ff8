"""One Watch call's view of the catalog's changes: bounded, and never with a gap."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from adapter_store.records import Change
from protos.errors import unavailable


class Subscription:
    """Carries changes from the threads that write the catalog to one reader on the event loop.

    A reader that falls `limit` changes behind loses the queue and is told to take a new snapshot instead, so that its
    memory is bounded and its state still exact.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self._loop = loop
        self._limit = limit
        self._changes: deque[Change] = deque()
        self._lagging = False
        self._wake = asyncio.Event()
        self.closed = False

    def offer(self, change: Change) -> None:
        """Called under the catalog's lock, from any thread."""
        if len(self._changes) >= self._limit:
            self._lagging = True
            self._changes.clear()
        if not self._lagging:
            self._changes.append(change)
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the reader with it
            self._loop.call_soon_threadsafe(self._wake.set)

    def restart(self) -> None:
        """Begin anew from a snapshot. Called under the catalog's lock, as it takes the snapshot."""
        self._changes.clear()
        self._lagging = False

    async def next(self) -> Change | None:
        """The next change, or None when the reader has lagged and needs a snapshot. UNAVAILABLE once closed."""
        while True:
            self._wake.clear()
            if self.closed:
                raise unavailable("the adapter store is stopping")
            if self._lagging:
                return None
            with contextlib.suppress(IndexError):  # emptied by `offer` between look and take
                return self._changes.popleft()
            await self._wake.wait()

    def close(self) -> None:
        """End the reading. Called on the loop; the catalog forgets the subscription at its next change."""
        self.closed = True
        self._wake.set()
