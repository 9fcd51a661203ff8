"""The service in front of an engine in the test's hands."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import BPE

from model_server import messages
from model_server.intake import Intake, Parsed
from model_server.request import Finish
from model_server.runner import Sampled
from model_server.servicer import Servicer
from model_server.tokenizer import Tokenizer
from protos import common_pb2, errors, model_server_pb2, serving
from protos.model_server_pb2_grpc import ModelServerStub, add_ModelServerServicer_to_server
from tests.model_server.fake_engine import INFO, FakeEngine, ended, settle, started


class Context:
    """Of a call with so much time left."""

    def __init__(self, remaining_s: float | None = None) -> None:
        self._remaining_s = remaining_s

    def time_remaining(self) -> float | None:
        return self._remaining_s


def servicer(engine: FakeEngine, intake: type[Intake] = Intake) -> Servicer:
    backend = Backend(BPE(vocab={word: index for index, word in enumerate("abcdefgh")}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, {})
    return Servicer(engine.bridge, intake(tokenizer, INFO, 16), tokenizer, INFO, lambda: "here")


def request(**sampling: Any) -> model_server_pb2.ServerGenerateRequest:
    prompt = common_pb2.Prompt(token_ids=common_pb2.TokenIds(ids=[1]))
    return model_server_pb2.ServerGenerateRequest(prompt=prompt, sampling=common_pb2.SamplingParams(**sampling))


async def submitted(engine: FakeEngine, events: AsyncIterator[Any]) -> tuple[asyncio.Task[Any], messages.Submit]:
    """The call's next event, awaited, and what the engine got."""
    pending = asyncio.ensure_future(anext(events))
    return pending, await engine.next(messages.Submit)


@asynccontextmanager
async def served(service: Servicer) -> AsyncIterator[ModelServerStub]:
    server = grpc.aio.server(interceptors=[serving.ErrorInterceptor()])
    add_ModelServerServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with serving.channel(f"127.0.0.1:{port}") as channel:
        yield ModelServerStub(channel)
    await server.stop(None)


@pytest.mark.parametrize("failure", ["cancelled", "expired", "closed"])
async def test_however_a_call_ends_no_place_stays_promised(failure: str) -> None:
    async with started(max_requests=4) as engine:
        events = servicer(engine).Generate(request(n=4), Context())
        pending, submit = await submitted(engine, events)
        if failure == "cancelled":
            pending.cancel()
        else:
            engine.send(messages.Started(submit.key, 0))
            await pending
        if failure == "closed":
            await events.aclose()
        engine.send(ended(submit.key, Finish.DEADLINE))
        if failure == "expired":
            with pytest.raises(errors.ServiceError):
                await anext(events)
        await settle()
        assert engine.bridge.idle.is_set()
        engine.bridge.open(4, lambda _: None)


async def test_lost_tokens_fail_the_stream() -> None:
    async with started() as engine:
        events = servicer(engine).Generate(request(), Context())
        pending, submit = await submitted(engine, events)
        engine.send(
            messages.Started(submit.key, 0),
            messages.Tokens(submit.key, 0, [Sampled(1)]),
            messages.Tokens(submit.key, 2, [Sampled(2)]),
        )
        await pending
        assert list((await anext(events)).delta.token_ids) == [1]
        with pytest.raises(errors.ServiceError) as caught:
            await anext(events)
        assert caught.value.code is grpc.StatusCode.INTERNAL
        assert [cancel.key for cancel in engine.received(messages.Cancel)] == [submit.key]


@pytest.mark.parametrize(("remaining_s", "margin_s"), [(10.0, 0.1), (0.2, 0.02)])
async def test_the_engine_is_to_be_done_before_the_call(remaining_s: float, margin_s: float) -> None:
    async with started() as engine:
        before_s = time.monotonic()
        events = servicer(engine).Generate(request(), Context(remaining_s))
        pending, submit = await submitted(engine, events)
        pending.cancel()
        assert submit.deadline_s is not None and submit.arrived_s >= before_s
        assert submit.deadline_s - submit.arrived_s == pytest.approx(remaining_s - margin_s)


async def test_the_phase_in_which_the_deadline_passed_reaches_the_caller() -> None:
    async with started() as engine, served(servicer(engine)) as stub:
        call: Any = stub.Generate(request(), timeout=1.0)
        events = aiter(call)
        pending, submit = await submitted(engine, events)
        asyncio.get_running_loop().call_at(submit.deadline_s, engine.send, ended(submit.key, Finish.DEADLINE))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pending
        error = errors.from_rpc_error(caught.value)
        detail = error.detail(error_details_pb2.ErrorInfo)
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert detail is not None and detail.metadata["phase"] == "queue"


async def test_a_drain_that_begins_while_a_prompt_is_read_refuses_it() -> None:
    reading, read = asyncio.Event(), asyncio.Event()

    class SlowIntake(Intake):
        async def parse(self, request: model_server_pb2.ServerGenerateRequest) -> Parsed:
            reading.set()
            await read.wait()
            return await super().parse(request)

    async with started() as engine:
        service = servicer(engine, SlowIntake)
        pending = asyncio.ensure_future(anext(service.Generate(request(), Context())))
        await reading.wait()
        service.start_draining()
        await service.drained(10.0)
        read.set()
        await settle()
        assert engine.received(messages.Submit) == []
        with pytest.raises(errors.ServiceError) as caught:
            await pending
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
