"""What one call reads: the events of its engine requests (one per choice), in the order in which they happened."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TypeGuard

from model_server import messages
from protos import errors

# What joined tokens may take in a message, roughly: well within serving.MAX_MESSAGE_BYTES, whatever their text.
_MAX_JOINED_BYTES = 2**20
_BYTES_PER_LOGPROB = 12

Event = messages.Started | messages.PromptScored | messages.Tokens | messages.Ended


class EngineStream:
    """Ends when every request added has ended. Opened and closed by the bridge."""

    def __init__(self, cancel: Callable[[int], None], on_end: Callable[[messages.Ended], object]) -> None:
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
        """`first` joined with the tokens that are waiting behind it, as far as one message holds them: a slow reader gets
        fewer, longer deltas."""
        sampled = list(first.sampled)
        num_bytes = _num_bytes(first)
        while (
            num_bytes < _MAX_JOINED_BYTES and self._events and _follows(event := self._events[0], first, len(sampled))
        ):
            sampled += event.sampled
            num_bytes += _num_bytes(event)
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


def _follows(event: Event | None, first: messages.Tokens, num_sampled: int) -> TypeGuard[messages.Tokens]:
    """Whether `event` goes on where `num_sampled` tokens from `first` on end: no gap may vanish between them."""
    return isinstance(event, messages.Tokens) and event.key == first.key and event.index == first.index + num_sampled


def _num_bytes(tokens: messages.Tokens) -> int:
    return sum((1 + len(sampled.top)) * _BYTES_PER_LOGPROB for sampled in tokens.sampled)
