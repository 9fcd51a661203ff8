"""What one call reads: the events of its engine requests (one per choice), in the order in which they happened."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from model_server import messages
from protos import errors

Event = messages.Started | messages.PromptScored | messages.Tokens | messages.Ended


class EngineStream:
    """Ends when every request added has ended. `cancel` it in a `finally`: the engine then lets go within a step."""

    def __init__(self, cancel: Callable[[int], None], on_end: Callable[[messages.Ended], None]) -> None:
        """`cancel(key)` tells the engine; `on_end` is called with its last word on each request, also when nobody reads
        the stream any more."""
        self._cancel = cancel
        self._on_end = on_end
        self._events: deque[Event | None] = deque()
        self._arrived = asyncio.Event()
        self._unread: set[int] = set()  # requests whose Ended has not been read
        self._live: set[int] = set()  # those that the engine may still work on

    def add(self, key: int) -> None:
        self._unread.add(key)
        self._live.add(key)

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Raises UNAVAILABLE when the engine process dies."""
        while self._unread:
            while not self._events:
                self._arrived.clear()
                await self._arrived.wait()
            event = self._events.popleft()
            if event is None:
                raise errors.unavailable("the engine process died")
            yield event
            if isinstance(event, messages.Ended):
                self._unread.discard(event.key)

    def take_tokens(self, first: messages.Tokens) -> messages.Tokens:
        """`first` joined with the tokens that are waiting behind it: a slow reader gets fewer, longer deltas."""
        sampled = list(first.sampled)
        while self._events and isinstance(event := self._events[0], messages.Tokens) and event.key == first.key:
            sampled += event.sampled
            self._events.popleft()
        return messages.Tokens(first.key, first.index, sampled)

    def put(self, event: Event | None) -> None:
        """The bridge's side: the next event; None when there will be none."""
        if isinstance(event, messages.Ended):
            self._live.discard(event.key)
            self._on_end(event)
        elif event is None:
            self._live.clear()
        self._events.append(event)
        self._arrived.set()

    def cancel(self, key: int | None = None) -> None:
        """Ask the engine to drop one request, or all; nothing where it is over. Ended still follows."""
        for live in [key] if key is not None else list(self._live):
            if live in self._live:
                self._live.discard(live)
                self._cancel(live)
