"""One request's stream from a replica: placed, called, and tried elsewhere while nothing of it has been passed on."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator

import grpc
import grpc.aio
from google.rpc import error_details_pb2

from gateway.dispatcher import Dispatcher
from gateway.replicas import Replica
from gateway.request import Request
from observability import logs, spans
from observability.interceptors import REQUEST_ID_KEY
from observability.metrics import GatewayMetrics
from protos import common_pb2, model_server_pb2
from protos.errors import ServiceError, deadline_exceeded, from_rpc_error, unavailable

log = logs.get(__name__)
_RETRY_AFTER_S = 1.0
_ELSEWHERE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
# gRPC's clock on the way to the wire counts whole milliseconds; with less than this left nothing is sent.
_SENDING_S = 0.002


class Forwarder:
    def __init__(self, dispatcher: Dispatcher, max_attempts: int, metrics: GatewayMetrics) -> None:
        """A request is tried on at most `max_attempts` replicas, on none twice."""
        self._dispatcher = dispatcher
        self._max_attempts = max_attempts
        self._metrics = metrics

    async def events(
        self, request: Request, message: model_server_pb2.ServerGenerateRequest, deadline_s: float | None
    ) -> AsyncGenerator[common_pb2.GenerateEvent, None]:
        """The replica's events, Accepted and Finished completed with the gateway's part; always ends with Finished.

        `deadline_s` is monotonic time. Raises what the dispatcher raises; a replica's own errors unchanged; UNAVAILABLE
        when the replica is lost, at once if part of the answer has been passed on, else after the last attempt;
        DEADLINE_EXCEEDED in the last phase the replica told of, where it does not name one itself in time.
        """
        arrived_s = time.monotonic()
        begun = False
        while True:
            replica = await self._place(request, deadline_s)
            message.gateway_queue_s = time.monotonic() - arrived_s
            try:
                async with contextlib.aclosing(_call(replica, message, deadline_s)) as events:
                    async for event in events:
                        begun = True
                        yield event
                return
            except ServiceError as error:
                request.tried.add(replica.load.address)
                if begun or not self._worth_another(request, error):
                    raise
                log.warning("tried elsewhere", replica=replica.load.address, error=str(error))
                self._metrics.retried(replica.load.address)
            finally:
                self._dispatcher.release(replica)

    async def _place(self, request: Request, deadline_s: float | None) -> Replica:
        span = spans.start(
            "gateway.queue",
            attributes={spans.PRIORITY: request.priority.name.lower(), spans.ATTEMPT: len(request.tried) + 1},
        )
        error: str | None = "CANCELLED"
        try:
            replica = await self._dispatcher.place(request, deadline_s)
            error = None
            span.set_attribute(spans.REPLICA, replica.load.address)
            return replica
        except ServiceError as failure:
            error = failure.code.name
            raise
        finally:
            spans.end(span, error)

    def _worth_another(self, request: Request, error: ServiceError) -> bool:
        return (
            error.code in _ELSEWHERE
            and len(request.tried) < self._max_attempts
            and self._dispatcher.has_untried(request)
        )


async def _call(
    replica: Replica, message: model_server_pb2.ServerGenerateRequest, deadline_s: float | None
) -> AsyncGenerator[common_pb2.GenerateEvent, None]:
    address = replica.load.address
    timeout_s = None if deadline_s is None else _timeout_s(deadline_s - time.monotonic())
    call = replica.stub.Generate(message, timeout=timeout_s, metadata=((REQUEST_ID_KEY, message.request_id),))
    phase = "queue"  # until Accepted says that the engine has begun
    tokens = 0
    finished = False
    try:
        async for event in call:
            kind = event.WhichOneof("event")
            if kind == "delta":
                tokens += len(event.delta.token_ids)
                phase = "decode"
            elif kind == "accepted":
                phase = "prefill"
                event.accepted.queue_s = message.gateway_queue_s
                event.accepted.replica = address
            elif kind == "finished":
                event.finished.timings.gateway_queue_s = message.gateway_queue_s
                finished = True
            yield event
    except grpc.aio.AioRpcError as error:
        if not finished:  # else the answer is whole, whatever became of the connection
            raise _explained(error, address, phase, tokens) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # Not we were cancelled but the call, here: its channel was closed.
        raise unavailable(f"the call to model server {address} was cancelled", _RETRY_AFTER_S) from None
    finally:
        call.cancel()  # grpc does not cancel a call that nobody reads any more
    if not finished:
        raise unavailable(f"model server {address} ended the stream early, after {tokens} tokens", _RETRY_AFTER_S)


def _timeout_s(remaining_s: float) -> float:
    """For a call: at most 1 % less than what remains. Raises DEADLINE_EXCEEDED if that is next to nothing.

    The replica answers a margin before the deadline it sees, so that its word on the phase comes before our call is cut.
    gRPC sends a time in three digits, rounded up: of 100.1 s the replica would see 101. Ours lies just below such a number.
    """
    if remaining_s <= _SENDING_S:
        raise deadline_exceeded("queue")
    if remaining_s < 1:
        return remaining_s  # sent to the millisecond
    digit_s = 10.0 ** (math.floor(math.log10(remaining_s)) - 2)
    return math.floor(remaining_s / digit_s) * digit_s - _SENDING_S


def _explained(error: grpc.aio.AioRpcError, address: str, phase: str, tokens: int) -> ServiceError:
    """What the replica said, or where it said nothing typed, what that means here."""
    reported = from_rpc_error(error)
    if reported.code is grpc.StatusCode.DEADLINE_EXCEEDED and not reported.detail(error_details_pb2.ErrorInfo):
        return deadline_exceeded(phase)
    if reported.code is grpc.StatusCode.UNAVAILABLE and not reported.details:
        return unavailable(f"model server {address} was lost after {tokens} tokens: {reported.message}", _RETRY_AFTER_S)
    return reported
