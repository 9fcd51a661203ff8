"""Spans around real gRPC servers and channels, in every way a call can end."""

import asyncio
import gc
import logging
import time

import grpc
import grpc.aio
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from observability import logs, spans
from observability.interceptors import ServerTelemetryInterceptor, SyncClientTelemetry, client_interceptors
from observability.telemetry import setup
from protos.serving import Serving

SERVICE = "loramux.test.Echo"


@pytest.fixture
def exporter():
    exporter = InMemorySpanExporter()
    telemetry = setup("test", span_exporter=exporter)
    yield exporter
    telemetry.shutdown()


class Peer:
    """A server whose methods each show one style or one way to end."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.started = asyncio.Event()
        self.seen: list[tuple[str, str]] = []

    def note(self) -> None:
        self.seen.append((trace.format_span_id(trace.get_current_span().get_span_context().span_id), logs.request_id()))

    async def generator(self, request, context):
        self.note()
        for index in range(3):
            yield bytes([index])

    async def writer(self, request, context):
        self.note()
        for index in range(3):
            await context.write(bytes([index]))

    async def unary(self, request, context):
        self.note()
        return request

    async def fails(self, request, context):
        raise ValueError("boom")

    async def refuses(self, request, context):
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such thing")

    async def hangs(self, request, context):
        self.started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def endless(self, request, context):
        self.started.set()
        try:
            while True:
                yield b"x" * 1000
                await asyncio.sleep(0)
        finally:
            self.note()
            self.cancelled.set()

    def handler(self):
        unary = grpc.unary_unary_rpc_method_handler
        stream = grpc.unary_stream_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generator": stream(self.generator),
                "Writer": stream(self.writer),
                "Unary": unary(self.unary),
                "Fails": unary(self.fails),
                "Refuses": unary(self.refuses),
                "Hangs": unary(self.hangs),
                "Endless": stream(self.endless),
                "WatchThings": stream(self.generator),
            },
        )


@pytest.fixture
async def peer():
    peer = Peer()
    server = grpc.aio.server(interceptors=[ServerTelemetryInterceptor()])
    server.add_generic_rpc_handlers((peer.handler(),))
    peer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield peer
    await server.stop(None)


@pytest.fixture
async def channel(peer):
    async with grpc.aio.insecure_channel(peer.address, interceptors=list(client_interceptors())) as channel:
        yield channel


def unary(channel, name):
    return channel.unary_unary(f"/{SERVICE}/{name}")


def stream(channel, name):
    return channel.unary_stream(f"/{SERVICE}/{name}")


async def finished(exporter, count):
    """The spans, once `count` have ended; a short wait more shows that no further one does."""
    for _ in range(200):
        if len(exporter.get_finished_spans()) >= count:
            break
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    ended = exporter.get_finished_spans()
    assert len(ended) == count, [(span.name, span.kind) for span in ended]
    return {span.kind: span for span in ended}


@pytest.mark.parametrize("style", ["Generator", "Writer"])
async def test_both_handler_styles_give_one_span_under_the_client(exporter, peer, channel, style):  # OTL-01
    call = stream(channel, style)(b"", metadata=(("x-request-id", "r-1"),))
    assert [message async for message in call] == [b"\0", b"\1", b"\2"]
    by_kind = await finished(exporter, 2)
    server, client = by_kind[SpanKind.SERVER], by_kind[SpanKind.CLIENT]
    assert server.name == client.name == f"{SERVICE}/{style}"
    assert server.parent.span_id == client.context.span_id
    assert server.context.trace_id == client.context.trace_id
    assert server.attributes[spans.RPC_STATUS] == client.attributes[spans.RPC_STATUS] == "OK"
    assert server.attributes[spans.REQUEST_ID] == "r-1"
    assert peer.seen == [(trace.format_span_id(server.context.span_id), "r-1")]


async def test_writer_style_works_through_the_whole_server_stack(exporter):
    """Health's Watch is written in that style, and ours are answered through ErrorInterceptor too."""
    peer = Peer()
    serving = Serving([ServerTelemetryInterceptor()])
    serving.server.add_generic_rpc_handlers((peer.handler(),))
    await serving.start("127.0.0.1:0", [])
    async with grpc.aio.insecure_channel(f"127.0.0.1:{serving.port}") as channel:
        assert [m async for m in stream(channel, "Writer")(b"")] == [b"\0", b"\1", b"\2"]
        health = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        assert await health.read() != grpc.aio.EOF
        health.cancel()
    await serving.server.stop(None)
    by_kind = await finished(exporter, 1)
    assert by_kind[SpanKind.SERVER].attributes[spans.RPC_STATUS] == "OK"


async def test_request_id_is_made_up_where_missing(exporter, peer, channel):
    await unary(channel, "Unary")(b"a")
    await unary(channel, "Unary")(b"b")
    ids = {request_id for _, request_id in peer.seen}
    assert len(ids) == 2 and all(len(request_id) == 32 for request_id in ids)
    assert logs.request_id() == ""


async def test_cancelling_the_task_of_a_unary_call_reaches_the_server(exporter, peer, channel):  # OTL-03
    async def call():
        await unary(channel, "Hangs")(b"")

    task = asyncio.create_task(call())
    await peer.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(peer.cancelled.wait(), 2)
    by_kind = await finished(exporter, 2)
    assert by_kind[SpanKind.SERVER].attributes[spans.RPC_STATUS] == "CANCELLED"
    assert by_kind[SpanKind.SERVER].status.status_code is StatusCode.UNSET
    assert by_kind[SpanKind.CLIENT].attributes[spans.ERROR_TYPE] == "CANCELLED"


async def test_closing_in_another_task_logs_nothing(exporter, peer, channel, caplog):  # OTL-05
    call = stream(channel, "Endless")(b"")

    async def read():
        assert await call.read()

    async def cancel():
        call.cancel()

    with caplog.at_level(logging.WARNING):
        await asyncio.create_task(read())
        await asyncio.create_task(cancel())
        await asyncio.wait_for(peer.cancelled.wait(), 2)
        by_kind = await finished(exporter, 2)
    assert caplog.records == []
    # The handler's `finally` ran in the RPC's own context.
    assert peer.seen[0][0] == trace.format_span_id(by_kind[SpanKind.SERVER].context.span_id)


async def test_an_exception_is_recorded_once(exporter, peer, channel):  # OTL-07
    with pytest.raises(grpc.aio.AioRpcError):
        await unary(channel, "Fails")(b"")
    by_kind = await finished(exporter, 2)
    server = by_kind[SpanKind.SERVER]
    assert [event.name for event in server.events] == ["exception"]
    assert server.status.status_code is StatusCode.ERROR
    assert server.attributes[spans.ERROR_TYPE] == "UNKNOWN"
    assert by_kind[SpanKind.CLIENT].attributes[spans.RPC_STATUS] == "UNKNOWN"


async def test_a_callers_mistake_is_no_fault_of_the_server(exporter, peer, channel):
    with pytest.raises(grpc.aio.AioRpcError):
        await unary(channel, "Refuses")(b"")
    by_kind = await finished(exporter, 2)
    server = by_kind[SpanKind.SERVER]
    assert server.attributes[spans.RPC_STATUS] == server.attributes[spans.ERROR_TYPE] == "NOT_FOUND"
    assert server.status.status_code is StatusCode.UNSET and not server.events
    assert by_kind[SpanKind.CLIENT].status.status_code is StatusCode.ERROR


async def test_deadline(exporter, peer, channel):
    with pytest.raises(grpc.aio.AioRpcError):
        await unary(channel, "Hangs")(b"", timeout=0.05)
    by_kind = await finished(exporter, 2)
    assert {span.attributes[spans.RPC_STATUS] for span in by_kind.values()} == {"DEADLINE_EXCEEDED"}


async def test_a_stream_never_read_and_dropped_ends_its_span(exporter, peer, channel):  # OTL-09
    call = stream(channel, "Endless")(b"")
    await peer.started.wait()
    del call
    gc.collect()
    await asyncio.wait_for(peer.cancelled.wait(), 2)
    await finished(exporter, 2)


async def test_cancel_before_the_first_byte(exporter, peer, channel):  # OTL-09
    call = stream(channel, "Endless")(b"")
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.read()
    await asyncio.sleep(0.1)
    for span in exporter.get_finished_spans():
        assert span.attributes[spans.RPC_STATUS] == "CANCELLED"
    assert sum(span.kind is SpanKind.CLIENT for span in exporter.get_finished_spans()) == 1


async def test_health_and_watches_are_silent(exporter, peer, channel):
    assert [m async for m in stream(channel, "WatchThings")(b"")]
    await finished(exporter, 0)


async def test_synchronous_channel(exporter, peer):
    def calls():
        with grpc.insecure_channel(peer.address) as plain:
            channel = grpc.intercept_channel(plain, SyncClientTelemetry())
            assert unary(channel, "Unary")(b"hi") == b"hi"
            assert list(stream(channel, "Generator")(b"")) == [b"\0", b"\1", b"\2"]
            with pytest.raises(grpc.RpcError):
                unary(channel, "Refuses")(b"")
            call = stream(channel, "Endless")(b"")
            assert next(call)
            call.cancel()
            dropped = stream(channel, "Endless")(b"")
            assert next(dropped)
            del dropped

            # The drop's cancel needs the channel alive for a moment.
            for _ in range(100):
                if len(exporter.get_finished_spans()) == 10:
                    break
                time.sleep(0.02)

    await asyncio.to_thread(calls)
    for _ in range(100):
        if len(exporter.get_finished_spans()) == 10:
            break
        await asyncio.sleep(0.01)
    ended = exporter.get_finished_spans()
    clients = {span.context.span_id: span for span in ended if span.kind is SpanKind.CLIENT}
    servers = [span for span in ended if span.kind is SpanKind.SERVER]
    assert len(clients) == len(servers) == 5
    assert {span.parent.span_id for span in servers} == set(clients)
    assert sorted(span.attributes[spans.RPC_STATUS] for span in clients.values()) == [
        "CANCELLED", "CANCELLED", "NOT_FOUND", "OK", "OK",
    ]  # fmt: skip
