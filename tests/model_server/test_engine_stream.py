"""What the engine hears of a stream that is let go: one cancel for each request it may still work on, none for others."""

from __future__ import annotations

from model_server import messages
from model_server.engine_stream import EngineStream
from model_server.request import Finish
from model_server.runner import Sampled


def ended(key: int) -> messages.Ended:
    return messages.Ended(key, Finish.LENGTH, 0, None, 1, None, None, 0.0, None, None, None, 0)


async def test_nothing_is_cancelled_after_a_normal_end() -> None:
    """SCH-15: read to its end, or not read at all when it came."""
    for reads in (True, False):
        cancelled: list[int] = []
        stream = EngineStream(cancelled.append, lambda _: None)
        for key in (1, 2):
            stream.add(key)
            stream.put(messages.Tokens(key, 0, [Sampled(5)]))
            stream.put(ended(key))
        if reads:
            assert len([event async for event in stream]) == 4
        stream.cancel()
        stream.cancel(1)
        assert cancelled == []


async def test_what_still_runs_is_cancelled_once() -> None:
    cancelled: list[int] = []
    stream = EngineStream(cancelled.append, lambda _: None)
    for key in (1, 2, 3):
        stream.add(key)
    stream.put(ended(2))
    stream.cancel(3)
    stream.cancel()
    stream.cancel()
    assert cancelled == [3, 1]


async def test_nothing_is_cancelled_in_an_engine_that_died() -> None:
    cancelled: list[int] = []
    stream = EngineStream(cancelled.append, lambda _: None)
    stream.add(1)
    stream.put(None)
    stream.cancel()
    assert cancelled == []
