"""Nothing a client does, or stops doing, keeps pages: each is free again within two steps of the engine.

To count steps from outside, a cancel must arrive sooner than steps pass. So somebody always prefills a long prompt here:
its chunks are steps of hundreds of milliseconds, a cancel travels in a few.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest

from loramux.aio import AsyncClient, AsyncStream
from loramux.launcher import ADAPTER_STORE, Stack
from protos import common_pb2, gateway_pb2
from protos.errors import ServiceError
from tests.e2e.adapter_files import another_revision, publish
from tests.e2e.status_watch import StatusWatch, at_rest

LONG = 1024  # tokens: four chunks
LONG_PAGES = LONG // 16

_ROOT = Path(__file__).parents[2]
_openings = itertools.count(100)


def long_prompt(num_tokens: int = LONG) -> list[int]:
    """Another one each time: the prefix cache must not know it."""
    return [next(_openings), *(1000 + i for i in range(num_tokens - 1))]


@pytest.fixture
async def watch(stack: Stack) -> AsyncIterator[StatusWatch]:
    async with StatusWatch(stack.model_servers[0]) as watch:
        yield watch


async def fails_with(code: grpc.StatusCode, stream: AsyncStream) -> None:
    with pytest.raises(ServiceError) as caught:
        await stream.read()
    assert caught.value.code is code, str(caught.value)


async def cancel(stream: AsyncStream) -> None:
    stream.cancel()
    await fails_with(grpc.StatusCode.CANCELLED, stream)


@contextmanager
def stopped(group: int) -> Iterator[None]:
    """A process group that answers nobody for a while."""
    os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(group, signal.SIGCONT)


async def test_while_it_prefills(client: AsyncClient, watch: StatusWatch) -> None:
    before = watch.latest.step
    async with client.generate(long_prompt(), max_tokens=100) as stream:
        busy = await watch.until(lambda status: status.step > before and status.running == 1)
        assert busy.free_pages == busy.num_pages - LONG_PAGES
        at_step = watch.latest.step
        await cancel(stream)
        assert (await watch.until_idle()).step <= at_step + 2


async def test_while_it_decodes_next_to_another(client: AsyncClient, watch: StatusWatch) -> None:
    """SCH-15: mid-stream."""
    async with client.generate("Once upon a time", max_tokens=1500, ignore_eos=True) as decoding:
        await watch.until(lambda status: status.running == 1)
        async with client.generate(long_prompt(), max_tokens=2) as other:
            await watch.until(lambda status: status.running == 2)
            at_step = watch.latest.step
            decoding.cancel()
            freed = await watch.until(lambda status: status.running == 1)
            assert freed.step <= at_step + 2
            assert freed.free_pages == freed.num_pages - LONG_PAGES
            await other.read()
            assert len(other.token_ids) == 2


async def test_while_it_waits(client: AsyncClient, watch: StatusWatch) -> None:
    async with client.generate(long_prompt(2 * LONG), max_tokens=1):
        await watch.until(lambda status: status.running == 1)
        async with client.generate("Hello", max_tokens=5) as second:
            # The first takes the whole budget of every step, so the second waits.
            await watch.until(lambda status: status.waiting == 1)
            at_step = watch.latest.step
            await cancel(second)
            assert second.accepted is None
            gone = await watch.until(lambda status: status.waiting == 0)
            assert gone.step <= at_step + 2 and gone.running == 1


async def test_while_its_adapter_loads(
    stack: Stack, client: AsyncClient, watch: StatusWatch, demo_adapters: dict[str, Path], tmp_path: Path
) -> None:
    revision = await publish(client, another_revision(demo_adapters["sentiment"], tmp_path / "cold"), "cold")
    with stopped(stack.processes[ADAPTER_STORE].pid):
        async with (
            client.generate("Hello", adapter="cold", max_tokens=2) as parked,
            client.generate("Hello", adapter="cold", max_tokens=2, timeout_s=5) as expiring,
        ):
            await watch.until(lambda status: status.parked == 2)
            await cancel(parked)
            assert (await watch.until(lambda status: status.parked < 2)).parked == 1
            # A cold adapter stalls nobody but its own requests.
            assert await client.generate("Hello", max_tokens=2).read()
            await fails_with(grpc.StatusCode.DEADLINE_EXCEEDED, expiring)
            await watch.until_idle()
    # Nobody waits for it any more when it arrives; it serves whoever asks next.
    async with client.generate("Hello", adapter="cold", max_tokens=2) as stream:
        await stream.read()
        assert stream.accepted is not None and stream.accepted.adapter.revision == revision


@pytest.mark.parametrize("timeout_s", [0.05, 1.0])
async def test_deadline_on_a_long_generation(client: AsyncClient, watch: StatusWatch, timeout_s: float) -> None:
    stream = client.generate("Once upon a time", max_tokens=1500, ignore_eos=True, timeout_s=timeout_s)
    await fails_with(grpc.StatusCode.DEADLINE_EXCEEDED, stream)
    await watch.until_idle()


async def test_deadline_in_the_past(client: AsyncClient, watch: StatusWatch) -> None:
    before = watch.latest.step
    await fails_with(grpc.StatusCode.DEADLINE_EXCEEDED, client.generate("Hello", max_tokens=5, timeout_s=0))
    assert (await watch.until_idle()).step == before


async def test_deadline_that_passes_in_the_queue_never_starts(client: AsyncClient, watch: StatusWatch) -> None:
    first_seen = len(watch.seen)
    async with client.generate(long_prompt(), max_tokens=1) as first:
        await watch.until(lambda status: status.running == 1)
        late = client.generate("Hello", max_tokens=5, timeout_s=0.1)
        await fails_with(grpc.StatusCode.DEADLINE_EXCEEDED, late)
        assert late.accepted is None
        await first.read()
    await watch.until_idle()
    assert max(status.running for status in watch.seen[first_seen:]) == 1


async def test_client_killed_during_a_unary_call(stack: Stack, watch: StatusWatch) -> None:
    """SCH-15: mid-unary."""
    request = gateway_pb2.GenerateRequest(
        target=common_pb2.Target(base=common_pb2.Target.Base()),
        prompt=common_pb2.Prompt(text="Once upon a time"),
        sampling=common_pb2.SamplingParams(max_tokens=1500, ignore_eos=True),
    )
    program = (
        "import sys, grpc\n"
        "from protos import gateway_pb2, gateway_pb2_grpc\n"
        "stub = gateway_pb2_grpc.GenerationStub(grpc.insecure_channel(sys.argv[1]))\n"
        "stub.GenerateUnary(gateway_pb2.GenerateRequest.FromString(bytes.fromhex(sys.argv[2])))\n"
    )
    command = [sys.executable, "-c", program, stack.gateway, request.SerializeToString().hex()]
    caller = await asyncio.create_subprocess_exec(*command, cwd=_ROOT)
    try:
        await watch.until(lambda status: status.running == 1)
    finally:
        caller.kill()
        await caller.wait()
    await watch.until_idle()


async def test_many_at_any_moment(client: AsyncClient, watch: StatusWatch) -> None:
    rng = random.Random(1)

    async def one(index: int) -> None:
        prompt = long_prompt(rng.randrange(20, 400)) if index % 2 else "Hello"
        adapter = rng.choice([None, "sentiment", "json-answer"])
        async with client.generate(prompt, adapter=adapter, max_tokens=400, ignore_eos=True) as stream:
            with suppress(TimeoutError):
                await asyncio.wait_for(stream.read(), rng.random() * 3)

    await asyncio.gather(*(one(index) for index in range(24)))
    assert at_rest(await watch.until_idle())
