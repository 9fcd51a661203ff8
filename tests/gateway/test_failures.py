"""Replicas that die, refuse, hang and come back; callers that cancel, run out of time or vanish."""

import asyncio
import gc
import random
import time

import grpc
import psutil
import pytest

from gateway.forwarder import Forwarder
from gateway.request import Priority, Request
from observability.metrics import GatewayMetrics
from protos import errors, gateway_pb2_grpc, model_server_pb2, serving
from protos.serving import channel
from tests.gateway.peers import accepted, answers, ask, delta, finished, refuses, until


async def ending(call):
    """Events of a stream and the typed error it ended with, or None."""
    events = []
    try:
        async for event in call:
            events.append(event)
    except grpc.aio.AioRpcError as error:
        return events, errors.from_rpc_error(error)
    return events, None


def kinds(events):
    return [event.WhichOneof("event") for event in events]


async def test_streams_are_spread_and_a_death_loses_only_its_own(start_world):
    world = await start_world(answers(20, delay_s=0.02), answers(20, delay_s=0.02))
    calls = [asyncio.create_task(ending(world.stub.Generate(ask()))) for _ in range(12)]
    await until(lambda: sum(server.running for server in world.servers) == 12)
    assert [server.running for server in world.servers] == [6, 6]
    await asyncio.sleep(0.05)
    dead = world.server
    died_s = time.monotonic()
    await dead.kill()
    await until(lambda: not world.loads()[dead.address].ready)
    assert time.monotonic() - died_s < 0.5
    results = await asyncio.gather(*calls)
    lost = [error for _, error in results if error is not None]
    assert len(lost) == 6
    assert {error.code for error in lost} == {grpc.StatusCode.UNAVAILABLE}
    assert all(dead.address in error.message and "tokens" in error.message for error in lost)
    assert all(kinds(events)[-1] == "finished" for events, error in results if error is None)
    # Restarted, it is used again within about a second.
    await dead.start()
    await until(lambda: world.loads()[dead.address].ready)
    assert time.monotonic() - died_s < 5
    before = len(dead.requests)
    await asyncio.gather(*(ending(world.stub.Generate(ask())) for _ in range(4)))
    assert len(dead.requests) == before + 2
    await world.idle()


async def test_a_restarted_server_needs_no_registration(start_world):  # FLT-01
    world = await start_world(answers())
    revision = await world.store.put("alpha")
    await until(lambda: len(world.gateway.catalog))
    assert (await world.stub.GenerateUnary(ask("alpha"))).choices[0].text
    await world.server.kill()
    await until(lambda: not world.loads()[world.server.address].ready)
    waiting = asyncio.create_task(ending(world.stub.Generate(ask("alpha"))))
    await asyncio.sleep(0.05)
    await world.server.start()
    events, error = await waiting
    assert error is None and events[0].accepted.adapter.revision == revision


async def test_one_that_refuses_is_tried_once_then_the_other(start_world):  # FLT-03
    world = await start_world(refuses(errors.unavailable("draining")), answers())
    for _ in range(4):
        events, error = await ending(world.stub.Generate(ask()))
        assert error is None and kinds(events)[-1] == "finished"
        assert events[0].accepted.replica == world.servers[1].address
    assert len(world.servers[0].requests) <= 4
    await world.idle()


async def test_tries_are_bounded_and_the_last_refusal_is_told(start_world):  # FLT-03
    full = errors.resource_exhausted("engine.waiting", "too many requests wait", 0.5)
    world = await start_world(*[refuses(full)] * 4, max_attempts=3)
    events, error = await ending(world.stub.Generate(ask()))
    assert (events, error.code, error.details) == ([], full.code, full.details)
    assert sorted(len(server.requests) for server in world.servers) == [0, 1, 1, 1]
    await world.idle()


async def one_that_waits_for_the_full_second(start_world, **config):
    """A world whose first server drops the prompt "drop" and whose second is full; a call that the first has dropped;
    an event that ends what fills the second."""
    end = asyncio.Event()

    async def drops(request, context):
        if request.prompt.text == "drop":
            raise errors.unavailable("dropped")
        async for item in answers(1)(request, context):
            yield item

    async def holds(request, context):
        yield accepted(request)
        await end.wait()
        yield finished(0)

    world = await start_world(drops, holds, max_outstanding=1, **config)
    first, second = world.servers
    await first.set_status(draining=True)
    await until(lambda: not world.loads()[first.address].ready)
    filling = asyncio.create_task(ending(world.stub.Generate(ask())))
    await until(lambda: second.running == 1)
    await first.set_status(draining=False)
    await until(lambda: world.loads()[first.address].ready)
    dropped = asyncio.create_task(ending(world.stub.Generate(ask(text="drop"))))
    await until(lambda: first.ended == ["failed"] and world.gateway.dispatcher.num_waiting == 1)
    world.gateway.dispatcher.check_integrity()
    return world, dropped, filling, end


async def test_one_that_waits_for_a_full_replica_blocks_nobody(start_world):
    world, dropped, filling, end = await one_that_waits_for_the_full_second(start_world)
    for _ in range(3):
        events, error = await asyncio.wait_for(ending(world.stub.Generate(ask())), 2)
        assert error is None and events[0].accepted.replica == world.server.address
    assert not dropped.done()
    end.set()
    events, error = await dropped
    assert error is None and events[0].accepted.replica == world.servers[1].address
    assert (await filling)[1] is None
    await world.idle()


async def test_one_whose_last_replica_goes_is_told_so_and_blocks_nobody(start_world):
    world, dropped, filling, end = await one_that_waits_for_the_full_second(start_world, replica_wait_s=0.5)
    await asyncio.sleep(0.6)
    assert not dropped.done(), "full is not gone"
    await world.servers[1].set_status(draining=True)
    await until(lambda: not world.loads()[world.servers[1].address].ready)
    gone_s = time.monotonic()
    assert (await asyncio.wait_for(ending(world.stub.Generate(ask())), 2))[1] is None
    _, error = await asyncio.wait_for(dropped, 3)
    assert error.code is grpc.StatusCode.UNAVAILABLE and "no model server" in error.message
    assert time.monotonic() - gone_s > 0.4
    end.set()
    await filling
    await world.idle()


async def test_a_request_is_not_tried_elsewhere_once_it_has_begun(start_world):
    async def breaks(request, context):
        yield accepted(request)
        yield delta(0)
        raise errors.unavailable("lost the device", 2.0)

    world = await start_world(breaks, breaks)
    events, error = await ending(world.stub.Generate(ask()))
    assert kinds(events) == ["accepted", "delta"]
    assert (error.code, error.message) == (grpc.StatusCode.UNAVAILABLE, "lost the device")
    assert sum(len(server.requests) for server in world.servers) == 1


async def test_other_errors_are_not_tried_elsewhere(start_world):
    world = await start_world(refuses(errors.internal("bug")), refuses(errors.internal("bug")))
    _, error = await ending(world.stub.Generate(ask()))
    assert error.code is grpc.StatusCode.INTERNAL
    assert sum(len(server.requests) for server in world.servers) == 1


async def test_a_stream_that_ends_without_finished_has_failed(start_world):
    async def short(request, context):
        yield accepted(request)
        yield delta(0)

    world = await start_world(short)
    events, error = await ending(world.stub.Generate(ask()))
    assert kinds(events) == ["accepted", "delta"]
    assert error.code is grpc.StatusCode.UNAVAILABLE and "early" in error.message


async def test_no_replica(start_world):
    world = await start_world(replica_wait_s=0.2)
    _, error = await ending(world.stub.Generate(ask()))
    assert error.code is grpc.StatusCode.UNAVAILABLE and "no model server" in error.message


async def test_a_draining_replica_gets_nothing_new(start_world):
    world = await start_world(answers(), answers())
    await world.server.set_status(draining=True)
    await until(lambda: not world.loads()[world.server.address].ready)
    for _ in range(3):
        assert (await ending(world.stub.Generate(ask())))[1] is None
    assert world.server.requests == []


async def test_the_catalog_and_the_replicas_heal(start_world):  # FLT-05
    """Health flaps and the store restarts under load; no request is ever told that its adapter does not exist."""
    world = await start_world(answers(3), answers(3), replica_wait_s=5)
    await world.store.put("alpha")
    await until(lambda: len(world.gateway.catalog))
    stop = asyncio.Event()

    async def load():
        while not stop.is_set():
            _, error = await ending(world.stub.Generate(ask("alpha")))
            assert error is None, error

    async def flap(server):
        for _ in range(20):
            await server.serving.set_ready(False)
            await asyncio.sleep(0.01)
            await server.serving.set_ready(True)
            await asyncio.sleep(0.03)

    loads = [asyncio.create_task(load()) for _ in range(4)]
    flapping = [asyncio.create_task(flap(server)) for server in world.servers]
    await world.store.stop()
    await asyncio.sleep(0.2)
    await world.store.start()
    second = await world.store.put("alpha", seed=2)
    await until(lambda: dict(world.gateway.catalog)["alpha"].newest == second, 5)
    await asyncio.gather(*flapping)
    stop.set()
    await asyncio.gather(*loads)
    await until(lambda: all(load.ready for load in world.gateway.replicas.loads))
    await world.idle()


async def test_a_cancelled_stream_is_cancelled_at_the_replica(start_world):  # SCH-15
    world = await start_world(answers(10_000, delay_s=0.01))
    call = world.stub.Generate(ask())
    assert (await call.read()).WhichOneof("event") == "accepted"
    call.cancel()
    await until(lambda: world.server.ended == ["cancelled"])
    await world.idle()


async def test_a_cancelled_unary_call_is_cancelled_at_the_replica(start_world):  # SCH-15
    world = await start_world(answers(10_000, delay_s=0.01))
    call = asyncio.create_task(_unary(world))
    await until(lambda: world.server.running)
    call.cancel()
    await until(lambda: world.server.ended == ["cancelled"])
    await world.idle()


async def _unary(world):
    return await world.stub.GenerateUnary(ask())


async def test_a_client_that_vanishes_is_cancelled_at_the_replica(start_world):  # SCH-15
    world = await start_world(answers(10_000, delay_s=0.01))
    connection = channel(world.gateway.address)
    call = gateway_pb2_grpc.GenerationStub(connection).Generate(ask())
    await call.read()
    await connection.close()
    await until(lambda: world.server.ended == ["cancelled"])
    await world.idle()


async def test_a_deadline_reaches_the_replica_and_its_phase_the_caller(start_world):  # RPC-11
    world = await start_world(answers(10_000, delay_s=0.01))
    started_s = time.monotonic()
    events, error = await ending(world.stub.Generate(ask(), timeout=0.8))
    assert time.monotonic() - started_s < 2
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert error.details[0].metadata["phase"] == "decode" and kinds(events)[:2] == ["accepted", "delta"]
    assert world.server.remaining_s[0] < 0.8
    await until(lambda: world.server.ended == ["cancelled"])
    await world.idle()


@pytest.mark.parametrize(
    ("sends", "phase"), [([], "queue"), ([accepted], "prefill"), ([accepted, lambda request: delta(0)], "decode")]
)
async def test_of_a_silent_replica_the_last_known_phase_is_told(start_world, sends, phase):
    async def falls_silent(request, context):
        for make in sends:
            yield make(request)
        await asyncio.sleep(60)

    world = await start_world(falls_silent)
    events, error = await ending(world.stub.Generate(ask(), timeout=0.5))
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED and len(events) == len(sends)
    assert error.details[0].metadata["phase"] == phase
    await world.idle()


async def test_a_replicas_own_word_on_the_phase_comes_first(start_world):
    async def parks(request, context):
        await asyncio.sleep(0.9 * context.time_remaining())  # the margin a model server takes
        raise errors.deadline_exceeded("adapter_load")
        yield

    world = await start_world(parks)
    _, error = await ending(world.stub.Generate(ask(), timeout=0.9))
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED and error.details[0].metadata["phase"] == "adapter_load"


@pytest.mark.parametrize("timeout_s", [5.432, 12.341, 29.9, 100.2])
async def test_a_replica_sees_no_later_deadline_than_ours(start_world, timeout_s):
    """gRPC rounds times up by as much as 1 %: more than the margin by which a typed error comes before the cut."""
    world = await start_world(answers(1))
    assert (await ending(world.stub.Generate(ask(), timeout=timeout_s)))[1] is None
    assert 0.97 * timeout_s < world.server.remaining_s[0] < timeout_s - 0.05


async def test_a_request_out_of_time_when_placed_is_not_forwarded(start_world):
    world = await start_world(answers())
    request = Request("r", "tenant", Priority.NORMAL, None, cost=1)
    forwarder = Forwarder(world.gateway.dispatcher, 3, GatewayMetrics())
    with pytest.raises(errors.ServiceError) as raised:
        await anext(forwarder.events(request, model_server_pb2.ServerGenerateRequest(), time.monotonic()))
    assert raised.value.details[0].metadata["phase"] == "queue"
    await world.idle()
    assert world.server.requests == []


async def test_an_expired_deadline_never_starts(start_world):  # RPC-11
    world = await start_world(answers())
    for timeout in (0.0, 1e-6):
        _, error = await ending(world.stub.Generate(ask(), timeout=timeout))
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await world.idle()
    assert world.server.requests == []


async def test_a_deadline_in_the_queue_says_so_and_leaves_it(start_world):
    world = await start_world(answers(10_000, delay_s=0.01), max_outstanding=1)
    running = world.stub.Generate(ask())
    await running.read()
    _, error = await ending(world.stub.Generate(ask(), timeout=0.6))
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED and error.details[0].metadata["phase"] == "queue"
    cancelled = world.stub.Generate(ask())
    reading = asyncio.create_task(cancelled.read())
    await asyncio.sleep(0.05)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    running.cancel()
    await world.idle()
    assert len(world.server.requests) == 1


async def test_replicas_never_get_more_than_they_may_and_a_full_queue_refuses(start_world):
    world = await start_world(answers(5, delay_s=0.02), max_outstanding=2, queue_limit=4)
    calls = [asyncio.create_task(ending(world.stub.Generate(ask()))) for _ in range(6)]
    await until(lambda: world.gateway.dispatcher.num_waiting == 4)
    _, error = await ending(world.stub.Generate(ask()))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert [type(detail).__name__ for detail in error.details] == ["QuotaFailure", "RetryInfo"]
    assert all(error is None for _, error in await asyncio.gather(*calls))
    assert world.server.most_running == 2
    await world.idle()


async def test_a_handler_that_raises_cancelled_by_itself_gives_a_status(start_world):  # RPC-01
    async def aborted(request, context):
        yield accepted(request)
        raise asyncio.CancelledError

    world = await start_world(aborted)
    events, error = await asyncio.wait_for(ending(world.stub.Generate(ask())), 3)
    assert kinds(events) == ["accepted"] and error.code is grpc.StatusCode.UNAVAILABLE
    await world.idle()


async def test_cancelled_streams_leak_nothing(start_world):  # RPC-03, scaled down
    world = await start_world(answers(10_000, delay_s=0.001))

    async def one():
        call = world.stub.Generate(ask())
        await call.read()
        call.cancel()

    async def batch():
        for _ in range(2):
            await asyncio.gather(*(one() for _ in range(20)))
        await world.idle()
        gc.collect()
        return psutil.Process().memory_info().rss

    # The process's size jumps up and down by megabytes; its low points tell.
    await batch()
    before = min([await batch() for _ in range(4)])
    tasks = len(asyncio.all_tasks())
    after = min([await batch() for _ in range(4)])
    assert after - before < 160 * 20_000, "more than 20 KB a call stays"
    assert len(asyncio.all_tasks()) <= tasks + 5


async def test_pings_do_not_earn_a_goaway(start_world, monkeypatch):  # RPC-07, scaled down
    """Client pings as often as our defaults allow against the server's limit, time scaled by 1/100."""
    scaled = {"grpc.keepalive_time_ms": 200, "grpc.http2.min_ping_interval_without_data_ms": 100}
    for name in ("CHANNEL_OPTIONS", "SERVER_OPTIONS"):
        options = [(key, scaled.get(key, value)) for key, value in getattr(serving, name)]
        monkeypatch.setattr(serving, name, options)

    async def slow_first_token(request, context):
        yield accepted(request)
        await asyncio.sleep(1.5)
        yield delta(0)
        yield finished(1)

    world = await start_world(slow_first_token)
    events, error = await ending(world.stub.Generate(ask()))
    assert error is None and kinds(events)[-1] == "finished"
    assert world.loads()[world.server.address].ready


async def test_reconnecting_leaks_no_sockets(start_world):  # RPC-09, scaled down
    world = await start_world(answers())
    process = psutil.Process()

    async def bounce():
        await world.server.kill()
        await until(lambda: not world.loads()[world.server.address].ready)
        await world.server.start()
        await until(lambda: world.loads()[world.server.address].ready)

    for _ in range(3):
        await bounce()
    before = process.num_fds()
    for _ in range(10):
        await bounce()
    assert process.num_fds() - before <= 5
    assert (await ending(world.stub.Generate(ask())))[1] is None


@pytest.mark.parametrize("seed", range(2))
async def test_a_cancel_that_races_the_end_is_counted_once(start_world, seed):  # RPC-13, scaled down
    draw = random.Random(seed)
    world = await start_world(answers(2))

    async def one():
        call = world.stub.Generate(ask())
        read = 0
        stop_at = draw.randint(2, 4)
        try:
            async for _ in call:
                read += 1
                if read == stop_at:
                    if draw.random() < 0.5:
                        await asyncio.sleep(draw.random() * 0.002)
                    call.cancel()
        except asyncio.CancelledError:
            pass

    for _ in range(10):
        await asyncio.gather(*(one() for _ in range(15)))
    await world.idle()
    assert (await ending(world.stub.Generate(ask())))[1] is None


async def test_the_drain_lets_streams_finish_and_refuses_new_ones(start_world):
    world = await start_world(answers(10, delay_s=0.02), drain_grace_s=5)
    stream = asyncio.create_task(ending(world.stub.Generate(ask())))
    await until(lambda: world.server.running)
    world.gateway.serving.request_stop()
    await asyncio.sleep(0.05)
    async with channel(world.gateway.address) as connection:
        _, error = await ending(gateway_pb2_grpc.GenerationStub(connection).Generate(ask(), timeout=1))
    assert error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    events, error = await stream
    assert error is None and kinds(events)[-1] == "finished"


async def test_tenants_pay_for_what_they_used_and_a_flood_delays_nobody_else(start_world):
    """Team a sends many requests at once; team b's few, sent later, are not behind all of them."""
    world = await start_world(answers(4, delay_s=0.005), max_outstanding=1, api_keys={"a": "a", "b": "b"})

    def call(key):
        return ending(world.stub.Generate(ask(), metadata=(("authorization", f"Bearer {key}"),)))

    flood = [asyncio.create_task(call("a")) for _ in range(12)]
    await until(lambda: len(world.server.requests) >= 1 and world.gateway.dispatcher.num_waiting == 11)
    late = [asyncio.create_task(call("b")) for _ in range(3)]
    assert all(error is None for _, error in await asyncio.gather(*flood, *late))
    order = [request.tenant for request in world.server.requests]
    assert order.index("b") <= 3 and order[:8].count("b") == 3
    await world.idle()
