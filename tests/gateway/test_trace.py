"""One unbroken trace per request, from the client's span to the model server's, however the request ends."""

import asyncio

import grpc
from opentelemetry.trace import SpanKind, StatusCode

from observability import spans
from protos import errors
from tests.gateway.peers import answers, ask, refuses, until

GENERATE = "loramux.v1.Generation/Generate"
FORWARD = "loramux.v1.ModelServer/Generate"


async def trace_of(exporter, count):
    """The `count` spans by name and kind; all of one trace, none with a parent that is missing."""
    await until(lambda: len(exporter.get_finished_spans()) >= count)
    await asyncio.sleep(0.05)
    ended = exporter.get_finished_spans()
    assert len(ended) == count, [span.name for span in ended]
    assert len({span.context.trace_id for span in ended}) == 1
    ids = {span.context.span_id for span in ended}
    assert [span for span in ended if span.parent is None or span.parent.span_id not in ids] == [
        span for span in ended if span.parent is None
    ]
    assert sum(span.parent is None for span in ended) == 1
    return {(span.name, span.kind): span for span in ended}


def is_child(child, parent):
    return child.parent.span_id == parent.context.span_id


def chain(found):
    client, server = found[GENERATE, SpanKind.CLIENT], found[GENERATE, SpanKind.SERVER]
    forward, engine = found[FORWARD, SpanKind.CLIENT], found[FORWARD, SpanKind.SERVER]
    queue = found["gateway.queue", SpanKind.INTERNAL]
    assert is_child(server, client) and is_child(queue, server) and is_child(forward, server)
    assert is_child(engine, forward)
    return client, server, queue, forward, engine


async def test_a_stream_gives_one_trace(start_world, exporter):
    world = await start_world(answers(3))
    revision = await world.store.put("alpha", alias="prod")
    await until(lambda: len(world.gateway.catalog))
    request = ask("alpha", alias="prod", max_tokens=3, temperature=0.5, seed=2**64 - 1)
    assert [event async for event in world.stub.Generate(request, metadata=(("x-request-id", "r-1"),))]
    _, server, queue, forward, engine = chain(await trace_of(exporter, 5))
    seen = dict(server.attributes)
    assert seen[spans.REQUEST_MODEL] == "alpha@prod"
    assert seen[spans.RESPONSE_MODEL] == f"alpha@{revision}"
    assert seen[spans.OPERATION] == "text_completion" and seen[spans.PROVIDER] == "loramux"
    assert (seen[spans.INPUT_TOKENS], seen[spans.OUTPUT_TOKENS], seen[spans.FINISH_REASONS]) == (3, 3, ("length",))
    assert (seen[spans.REQUEST_MAX_TOKENS], seen[spans.REQUEST_TEMPERATURE]) == (3, 0.5)
    assert (seen[spans.REQUEST_ID], seen[spans.TENANT], seen[spans.PRIORITY]) == ("r-1", "anonymous", "normal")
    assert seen[spans.REPLICA] == queue.attributes[spans.REPLICA] == world.server.address
    assert engine.attributes[spans.REQUEST_ID] == "r-1"
    assert server.start_time <= queue.start_time <= queue.end_time <= forward.start_time
    assert {span.status.status_code for span in (server, queue, forward, engine)} == {StatusCode.UNSET}


async def test_the_base_model_is_named_once_known(start_world, exporter):
    world = await start_world(answers(1))
    assert [event async for event in world.stub.Generate(ask())]
    _, server, *_ = chain(await trace_of(exporter, 5))
    assert server.attributes[spans.REQUEST_MODEL] == server.attributes[spans.RESPONSE_MODEL] == "tiny"


async def test_a_cancelled_stream_gives_one_whole_trace(start_world, exporter):
    world = await start_world(answers(10_000, delay_s=0.01))
    call = world.stub.Generate(ask())
    await call.read()
    call.cancel()
    await world.idle()
    client, server, queue, forward, engine = chain(await trace_of(exporter, 5))
    for span in (client, server, forward, engine):
        assert span.attributes[spans.RPC_STATUS] == "CANCELLED"
    assert queue.status.status_code is StatusCode.UNSET


async def test_a_cancel_in_the_queue_ends_the_spans(start_world, exporter):
    world = await start_world(answers(), max_outstanding=1, replica_wait_s=5)
    await world.server.serving.set_ready(False)
    await until(lambda: not world.loads()[world.server.address].ready)
    call = world.stub.Generate(ask())
    reading = asyncio.create_task(call.read())
    await asyncio.sleep(0.1)
    call.cancel()
    await asyncio.wait([reading])
    found = await trace_of(exporter, 3)
    assert found["gateway.queue", SpanKind.INTERNAL].attributes[spans.ERROR_TYPE] == "CANCELLED"


async def test_both_tries_are_in_the_trace(start_world, exporter):
    world = await start_world(refuses(errors.unavailable("draining")), answers(1))
    assert [event async for event in world.stub.Generate(ask())]
    await until(lambda: len(exporter.get_finished_spans()) >= 8)
    ended = exporter.get_finished_spans()
    queues = [span for span in ended if span.name == "gateway.queue"]
    assert [span.attributes[spans.ATTEMPT] for span in queues] == [1, 2]
    statuses = [
        span.attributes[spans.RPC_STATUS] for span in ended if span.name == FORWARD and span.kind is SpanKind.CLIENT
    ]
    assert statuses == ["UNAVAILABLE", "OK"]
    assert len({span.context.trace_id for span in ended}) == 1 and len(ended) == 8


async def test_a_refusal_is_seen_on_the_span(start_world, exporter):
    world = await start_world()
    call = world.stub.Generate(ask("nobody"))
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.NOT_FOUND
    found = await trace_of(exporter, 2)
    assert found[GENERATE, SpanKind.SERVER].attributes[spans.ERROR_TYPE] == "NOT_FOUND"
