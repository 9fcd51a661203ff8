"""One request, one trace: from the client's span over both servers' to the engine's phases, however the request ends.

Client, gateway and model server run in this process and share an in-memory exporter; the engine is a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from gateway.app import Gateway
from gateway.config import GatewayConfig
from loramux import requests
from loramux.aio import AsyncClient
from loramux.launcher import ADAPTER_STORE, Stack
from model_server.config import Config
from model_server.server import serve
from observability import spans, telemetry
from observability.interceptors import client_interceptors
from protos import gateway_pb2_grpc
from protos.errors import ServiceError
from protos.serving import Serving, channel
from tests.e2e.adapter_files import another_revision, publish, until
from tests.e2e.status_watch import StatusWatch

pytestmark = pytest.mark.asyncio(loop_scope="module")

GENERATE = "loramux.v1.Generation/Generate"
UNARY = "loramux.v1.Generation/GenerateUnary"
FORWARD = "loramux.v1.ModelServer/Generate"
# Calls a test makes to publish its adapter: traces of their own.
_PREPARATION = ("loramux.v1.AdapterStore/", "loramux.v1.Generation/ListModels")


@dataclass
class InProcess:
    gateway: Gateway
    model_server: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[InProcess]:
    """A gateway and a model server in this process, on the stack's adapter store; their cache is cold."""
    ready: asyncio.Future[Serving] = asyncio.get_running_loop().create_future()
    config = Config(
        listen="127.0.0.1:0",
        adapter_store=stack.adapter_store,
        cache_dir=tmp_path_factory.mktemp("cache"),
        kv_bytes=64 * 2**20,
        check_every_step=True,
    )
    serving = asyncio.create_task(serve(config, ready.set_result))
    await asyncio.wait([serving, ready], return_when=asyncio.FIRST_COMPLETED)
    server = ready.result()
    model_server = f"127.0.0.1:{server.port}"
    gateway = Gateway(GatewayConfig(listen="127.0.0.1:0", adapter_store=stack.adapter_store, replicas=(model_server,)))
    await gateway.start()
    running = asyncio.create_task(gateway.run())
    await gateway.store.loaded.wait()

    async def replica_ready() -> bool:
        return all(load.ready for load in gateway.replicas.loads)

    await until(replica_ready)
    yield InProcess(gateway, model_server)
    gateway.serving.request_stop()
    await running
    server.request_stop()
    assert await serving == 0


@pytest_asyncio.fixture(loop_scope="module")
async def client(stack: Stack, services: InProcess) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(services.gateway.address, adapter_store=stack.adapter_store) as client:
        yield client


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    handle = telemetry.setup("test", span_exporter=exporter, log_level="WARNING")
    yield exporter
    handle.shutdown()


class Trace:
    """The `count` spans that one request must leave: one trace, one root, no parent missing."""

    def __init__(self, ended: list[ReadableSpan]) -> None:
        self._spans = {(span.name, span.kind): span for span in ended}
        assert len(self._spans) == len(ended), [span.name for span in ended]
        assert len({span.context.trace_id for span in ended}) == 1
        by_id = {span.context.span_id: span for span in ended}
        roots = [span for span in ended if span.parent is None]
        assert len(roots) == 1
        for span in ended:
            assert span.parent is None or span.parent.span_id in by_id, f"{span.name} is an orphan"

    @classmethod
    async def of(cls, exporter: InMemorySpanExporter, count: int) -> Trace:
        def ended() -> list[ReadableSpan]:
            return [span for span in exporter.get_finished_spans() if not span.name.startswith(_PREPARATION)]

        async def all_ended() -> bool:
            return len(ended()) >= count

        await until(all_ended)
        await asyncio.sleep(0.1)  # for any there should not be
        found = ended()
        assert len(found) == count, sorted(span.name for span in found)
        return cls(found)

    def __getitem__(self, key: tuple[str, SpanKind] | str) -> ReadableSpan:
        return self._spans[(key, SpanKind.INTERNAL) if isinstance(key, str) else key]

    def check_chain(self, root: tuple[str, SpanKind], phases: list[str], method: str = GENERATE) -> None:
        """root → client's call → gateway → (queue, call → model server → the engine's `phases` in their order)."""
        call, server = self[method, SpanKind.CLIENT], self[method, SpanKind.SERVER]
        forward, engine = self[FORWARD, SpanKind.CLIENT], self[FORWARD, SpanKind.SERVER]
        assert self[root].parent is None
        if self[root] is not call:
            assert is_child(call, self[root])
        assert is_child(server, call) and is_child(self["gateway.queue"], server)
        assert is_child(forward, server) and is_child(engine, forward)
        assert [name for name, _ in self._spans if name.startswith("engine.")] == phases
        at_ns = engine.start_time
        assert at_ns is not None
        for phase in phases:
            span = self[phase]
            assert is_child(span, engine) and span.start_time is not None and span.end_time is not None
            # Each begins where the one before ended, up to the rounding of clocks.
            assert at_ns - 1_000_000 <= span.start_time <= span.end_time
            at_ns = span.end_time


def is_child(child: ReadableSpan, parent: ReadableSpan) -> bool:
    return child.parent is not None and child.parent.span_id == parent.context.span_id


async def test_a_stream_to_a_cold_adapter(
    client: AsyncClient,
    services: InProcess,
    exporter: InMemorySpanExporter,
    demo_adapters: dict[str, Path],
    tmp_path: Path,
) -> None:
    revision = await publish(client, another_revision(demo_adapters["sentiment"], tmp_path / "a"), "traced")
    stream = client.generate("Hello", adapter="traced", max_tokens=4, ignore_eos=True, request_id="r-1")
    await stream.read()
    trace = await Trace.of(exporter, 10)
    phases = ["engine.adapter_load", "engine.queue", "engine.prefill", "engine.decode"]
    trace.check_chain(("chat traced", SpanKind.CLIENT), phases)
    for key in ((GENERATE, SpanKind.SERVER), ("chat traced", SpanKind.CLIENT)):
        assert trace[key].attributes[spans.RESPONSE_MODEL] == f"traced@{revision}"
        assert trace[key].attributes[spans.REPLICA] == services.model_server
    for key in ((GENERATE, SpanKind.SERVER), (FORWARD, SpanKind.SERVER), ("chat traced", SpanKind.CLIENT)):
        assert trace[key].attributes[spans.REQUEST_ID] == "r-1"
    assert trace["engine.decode"].attributes[spans.OUTPUT_TOKENS] == 4
    assert all(span.status.status_code is not StatusCode.ERROR for span in exporter.get_finished_spans())


async def test_a_stream_of_the_base_model_loads_no_adapter(client: AsyncClient, exporter: InMemorySpanExporter) -> None:
    await client.generate("Hello", max_tokens=2).read()
    trace = await Trace.of(exporter, 9)
    trace.check_chain(("chat", SpanKind.CLIENT), ["engine.queue", "engine.prefill", "engine.decode"])


async def test_a_unary_call(services: InProcess, exporter: InMemorySpanExporter) -> None:
    request = requests.generate_request(
        "Hello", adapter="sentiment", revision=None, alias=None, priority="high", sampling={"max_tokens": 2}
    )
    async with channel(services.gateway.address, client_interceptors()) as connection:
        await gateway_pb2_grpc.GenerationStub(connection).GenerateUnary(request)  # type: ignore[misc]
    trace = await Trace.of(exporter, 9)
    phases = ["engine.adapter_load", "engine.queue", "engine.prefill", "engine.decode"]
    trace.check_chain((UNARY, SpanKind.CLIENT), phases, method=UNARY)


async def test_a_client_that_cancels_mid_stream(
    client: AsyncClient, services: InProcess, exporter: InMemorySpanExporter
) -> None:
    async with client.generate("Once upon a time", max_tokens=1000, ignore_eos=True) as stream:
        await anext(aiter(stream))
    trace = await Trace.of(exporter, 9)
    trace.check_chain(("chat", SpanKind.CLIENT), ["engine.queue", "engine.prefill", "engine.decode"])
    for key in (
        ("chat", SpanKind.CLIENT),
        (GENERATE, SpanKind.SERVER),
        (FORWARD, SpanKind.CLIENT),
        (FORWARD, SpanKind.SERVER),
        ("engine.decode", SpanKind.INTERNAL),
    ):
        assert trace[key].attributes[spans.ERROR_TYPE] == "CANCELLED", key
    async with StatusWatch(services.model_server) as watch:
        await watch.until_idle()


async def test_a_client_that_cancels_while_its_adapter_loads(
    stack: Stack,
    client: AsyncClient,
    services: InProcess,
    exporter: InMemorySpanExporter,
    demo_adapters: dict[str, Path],
    tmp_path: Path,
) -> None:
    await publish(client, another_revision(demo_adapters["sentiment"], tmp_path / "b"), "late")
    store = stack.processes[ADAPTER_STORE].pid
    async with StatusWatch(services.model_server) as watch:
        os.killpg(store, signal.SIGSTOP)
        try:
            async with client.generate("Hello", adapter="late", max_tokens=4):
                await watch.until(lambda status: status.parked == 1)
            await watch.until_idle()
            trace = await Trace.of(exporter, 7)
        finally:
            os.killpg(store, signal.SIGCONT)
    trace.check_chain(("chat late", SpanKind.CLIENT), ["engine.adapter_load"])
    assert trace["engine.adapter_load"].attributes[spans.ERROR_TYPE] == "CANCELLED"


async def test_a_refusal_ends_at_the_gateway(client: AsyncClient, exporter: InMemorySpanExporter) -> None:
    with pytest.raises(ServiceError):
        await client.generate("Hello", adapter="nobody").read()
    trace = await Trace.of(exporter, 3)
    assert trace[GENERATE, SpanKind.SERVER].attributes[spans.ERROR_TYPE] == "NOT_FOUND"
