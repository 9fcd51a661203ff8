"""The asyncio client, where it differs from the blocking one: how calls end."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from loramux import AsyncClient, ServiceError
from loramux.aio import AsyncStream
from protos import common_pb2, errors, gateway_pb2
from tests.loramux import scripted
from tests.loramux.scripted import ScriptedServer


@pytest.fixture
async def client(server: ScriptedServer) -> Any:
    async with AsyncClient(server.address, adapter_store=server.address) as client:
        yield client


async def cut_off(server: ScriptedServer) -> bool:
    return await asyncio.to_thread(server.generation.cut_off.wait, 5)


async def begun(stream: AsyncStream) -> asyncio.Task[None]:
    """A task that reads `stream`, after its first delta."""
    first = asyncio.Event()

    async def read() -> None:
        async for _ in stream:
            first.set()

    task = asyncio.create_task(read())
    await asyncio.wait_for(first.wait(), 5)
    return task


async def test_streams_deltas_between_accepted_and_finished(client: AsyncClient) -> None:
    stream = client.generate("Hi", adapter="sentiment")
    assert [delta.text async for delta in stream] == ["Hel", "lo", " 🌶️"]
    assert stream.accepted is not None and stream.accepted.adapter.adapter_id == "sentiment"
    assert stream.finished is not None and stream.finished.usage.output_tokens == 3


async def test_many_streams_at_once(client: AsyncClient) -> None:
    texts = await asyncio.gather(*(client.generate("Hi").read() for _ in range(20)))
    assert set(texts) == {"Hello 🌶️"}


async def test_a_servers_error_arrives_typed(client: AsyncClient, server: ScriptedServer) -> None:
    async def refuse(request: gateway_pb2.GenerateRequest) -> AsyncIterator[common_pb2.GenerateEvent]:
        yield scripted.accepted()
        raise errors.not_found("adapter", "sentimen", "no adapter 'sentimen'")

    server.generation.script = refuse
    with pytest.raises(ServiceError) as caught:
        await client.generate("Hi", adapter="sentimen").read()
    assert caught.value.code is grpc.StatusCode.NOT_FOUND


async def test_a_stream_without_finished_raises(client: AsyncClient, server: ScriptedServer) -> None:
    async def short(request: gateway_pb2.GenerateRequest) -> AsyncIterator[common_pb2.GenerateEvent]:
        yield scripted.accepted()

    server.generation.script = short
    with pytest.raises(ServiceError, match="without Finished"):
        await client.generate("Hi").read()


async def test_leaving_the_loop_cancels_the_call(client: AsyncClient, server: ScriptedServer) -> None:
    server.generation.script = scripted.endless
    stream = client.generate("Hi")
    async for _ in stream:
        break
    assert await cut_off(server)


async def test_leaving_the_with_block_cancels_the_call(client: AsyncClient, server: ScriptedServer) -> None:
    server.generation.script = scripted.endless
    async with client.generate("Hi") as stream:
        async for _ in stream:
            break
    assert await cut_off(server)


async def test_dropping_the_stream_cancels_the_call(client: AsyncClient, server: ScriptedServer) -> None:
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def endless(request: gateway_pb2.GenerateRequest) -> AsyncIterator[common_pb2.GenerateEvent]:
        loop.call_soon_threadsafe(started.set)
        async for event in scripted.endless(request):
            yield event

    server.generation.script = endless
    stream = client.generate("Hi")
    await asyncio.wait_for(started.wait(), 5)
    del stream
    gc.collect()
    assert await cut_off(server)


async def test_cancelling_the_reading_task_cancels_the_call(client: AsyncClient, server: ScriptedServer) -> None:
    server.generation.script = scripted.endless
    stream = client.generate("Hi")
    task = await begun(stream)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await cut_off(server)


async def test_cancelling_the_stream_does_not_look_like_the_task_was(
    client: AsyncClient, server: ScriptedServer
) -> None:
    server.generation.script = scripted.endless
    stream = client.generate("Hi")
    task = await begun(stream)
    stream.cancel()
    with pytest.raises(ServiceError) as caught:
        await task
    assert caught.value.code is grpc.StatusCode.CANCELLED
    assert await cut_off(server)


async def test_the_deadline_ends_the_stream(client: AsyncClient, server: ScriptedServer) -> None:
    server.generation.script = scripted.endless
    with pytest.raises(ServiceError) as caught:
        await client.generate("Hi", timeout_s=0.1).read()
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_adapters(client: AsyncClient, server: ScriptedServer, adapter_dir: Path) -> None:
    answer = await client.adapters.push(adapter_dir, "mine")
    assert answer.revision.ref.adapter_id == "mine"
    assert (await client.adapters.list()).revisions[0].max_rank == 8
    await client.adapters.alias("mine", "prod", scripted.REVISION)
    await client.adapters.rm("mine")
    assert (await client.models()).base_model == "tiny"
