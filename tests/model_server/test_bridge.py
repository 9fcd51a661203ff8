"""The bridge towards an engine in the test's hands: every stream gets its events, and places are counted once."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from model_server import messages
from model_server.engine_stream import EngineStream
from model_server.request import AdapterRef, Sampling
from model_server.runner import Sampled
from protos.errors import ServiceError
from tests.model_server.fake_engine import FakeEngine, ended, settle, started

REF = AdapterRef("a", "sha256:a")


def submit(engine: FakeEngine, stream: EngineStream) -> int:
    return engine.bridge.submit(
        stream,
        request_id="r",
        prompt_ids=[1],
        sampling=Sampling(max_tokens=1),
        adapter=None,
        priority=1,
        tenant="t",
        arrived_s=0.0,
        deadline_s=None,
    )


def nothing(_: messages.Ended) -> None:
    pass


def fail(*_: Any) -> None:
    raise OSError("read-only file system")


async def test_a_callback_that_fails_costs_nobody_an_event() -> None:
    async with started(on_adapter_done=fail) as engine:
        stream = engine.bridge.open(1, fail)
        key = submit(engine, stream)
        engine.send(
            messages.AdapterDone(REF, readable=False),
            messages.Started(key, 0),
            messages.Tokens(key, 0, [Sampled(5)]),
            ended(key, num_output=1),
        )
        async with asyncio.timeout(10):  # a lost Ended is waited for, for ever
            read = [type(event) async for event in stream]
        assert read == [messages.Started, messages.Tokens, messages.Ended]
        engine.bridge.close(stream)
        assert engine.bridge.idle.is_set()


async def test_places_are_kept_for_choices_that_are_still_to_come() -> None:
    async with started(max_requests=8) as engine:
        bridge = engine.bridge
        streams = [bridge.open(3, nothing) for _ in range(2)]
        for stream in streams:
            submit(engine, stream)
        with pytest.raises(ServiceError) as caught:
            bridge.open(3, nothing)
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "holds 6 of at most 8" in caught.value.message
        submit(engine, streams[0])  # one of those promised: no further place
        last = bridge.open(2, nothing)
        bridge.close(last)
        # Not all were submitted when it ended. What the engine still has keeps its place until Ended.
        bridge.close(streams[0])
        cancelled = [message.key for message in engine.received(messages.Cancel)]
        assert cancelled == [1, 3]
        bridge.close(bridge.open(3, nothing))
        with pytest.raises(ServiceError):
            bridge.open(4, nothing)
        engine.send(ended(1), ended(3))
        await settle()
        bridge.close(bridge.open(5, nothing))
        with pytest.raises(ServiceError):
            bridge.open(6, nothing)
        bridge.close(streams[1])
        engine.send(ended(2))
        await settle()
        assert bridge.idle.is_set()
        bridge.close(bridge.open(8, nothing))


async def test_it_is_not_idle_while_choices_are_still_to_come() -> None:
    """The first one is over before its reader had a turn to submit the second."""
    async with started() as engine:
        stream = engine.bridge.open(2, nothing)
        engine.send(ended(submit(engine, stream)))
        await settle()
        assert not engine.bridge.idle.is_set()
        engine.send(ended(submit(engine, stream)))
        await settle()
        assert engine.bridge.idle.is_set()
        engine.bridge.close(stream)


async def test_nothing_is_submitted_to_an_engine_that_died() -> None:
    async with started() as engine:
        stream = engine.bridge.open(2, nothing)
        submit(engine, stream)
        engine.die()
        await settle()
        with pytest.raises(ServiceError) as caught:
            submit(engine, stream)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        assert engine.bridge.idle.is_set()
        engine.bridge.close(stream)
