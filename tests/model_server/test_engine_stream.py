"""What the engine hears of a stream that is let go: one cancel for each request it may still work on, none for others; and
what a slow reader gets."""

from __future__ import annotations

from model_server import messages
from model_server.answer import position_logprobs
from model_server.engine_stream import EngineStream
from model_server.runner import Sampled
from protos import common_pb2, serving
from tests.model_server.fake_engine import ended


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


def waiting(*events: messages.Tokens | messages.Ended) -> tuple[EngineStream, messages.Tokens]:
    """A stream whose reader has read the first of these."""
    stream = EngineStream(lambda _: None, lambda _: None)
    for event in events[1:]:
        stream.put(event)
    assert isinstance(events[0], messages.Tokens)
    return stream, events[0]


def test_a_slow_reader_gets_what_waits_at_once() -> None:
    stream, first = waiting(*(messages.Tokens(1, index, [Sampled(index)]) for index in range(5)), ended(1))
    taken = stream.take_tokens(first)
    assert taken.index == 0 and [sampled.token_id for sampled in taken.sampled] == list(range(5))


def test_lost_tokens_do_not_vanish_between_their_neighbours() -> None:
    stream, first = waiting(*(messages.Tokens(1, index, [Sampled(index)]) for index in (0, 1, 3)))
    assert len(stream.take_tokens(first).sampled) == 2


def test_what_is_joined_fits_into_a_message() -> None:
    """A reader that stalled for 32000 tokens with 20 log probabilities each gets them all, in messages that can be sent."""
    top = tuple((2**31 - 1 - rank, -1.5) for rank in range(20))
    stream, first = waiting(*(messages.Tokens(1, index, [Sampled(2**31 - 1, -1.5, top)]) for index in range(32000)))
    num_taken, num_messages = 0, 0
    while True:
        taken = stream.take_tokens(first)
        assert taken.index == num_taken
        delta = common_pb2.Delta(
            text="x" * 16 * len(taken.sampled),
            token_ids=[sampled.token_id for sampled in taken.sampled],
            logprobs=[position_logprobs(sampled, -1.5) for sampled in taken.sampled],
        )
        assert delta.ByteSize() < serving.MAX_MESSAGE_BYTES // 2
        num_taken += len(taken.sampled)
        num_messages += 1
        if not stream._events:
            break
        event = stream._events.popleft()
        assert isinstance(event, messages.Tokens)
        first = event
    assert num_taken == 32000 and num_messages < 10
