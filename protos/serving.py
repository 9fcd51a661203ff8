"""How every loramux service is served and dialled: limits, keepalives that match, health, reflection, graceful drain.

Both sides of a connection take their options from here, so a client's pings never exceed what a server permits
(a server left at its default answers pings closer than 300 s with GOAWAY).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos import errors

log = logging.getLogger(__name__)

# One limit for both directions. Prompts are the largest messages; adapters travel in 1 MiB chunks.
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
CHUNK_BYTES = 1024 * 1024
KEEPALIVE_TIME_S = 20
KEEPALIVE_TIMEOUT_S = 10
# Less than KEEPALIVE_TIME_S, so that a client's clock may run fast without earning strikes.
MIN_PING_INTERVAL_S = 10

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    # A restarted server is found again within a second, not after gRPC's default back-off of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Whatever its name says: the least time that one attempt to connect is given. A busy server may need it.
    ("grpc.min_reconnect_backoff_ms", 5000),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_S * 1000),
    # Two servers on one port would each get half of the calls.
    ("grpc.so_reuseport", 0),
]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns ServiceError into the RPC's status; anything unforeseen into INTERNAL, logged with its traceback."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        if handler.response_streaming:
            inner_stream = handler.stream_stream if handler.request_streaming else handler.unary_stream

            async def stream(request: Any, context: Any) -> None:
                # Writes instead of yielding, so that a cancel during a write unwinds through here and the servicer's
                # `finally` runs now, in this task, not when the collector finds it.
                async with _reported(context, handler_call_details.method):
                    responses = inner_stream(request, context)
                    if inspect.isawaitable(responses):
                        await responses
                        return
                    try:
                        async for response in responses:
                            await context.write(response)
                    finally:
                        await responses.aclose()

            make_stream = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            return make_stream(stream, handler.request_deserializer, handler.response_serializer)
        inner_unary = handler.stream_unary if handler.request_streaming else handler.unary_unary

        async def unary(request: Any, context: Any) -> Any:
            async with _reported(context, handler_call_details.method):
                return await inner_unary(request, context)

        make_unary = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make_unary(unary, handler.request_deserializer, handler.response_serializer)


@contextlib.asynccontextmanager
async def _reported(context: grpc.aio.ServicerContext[Any, Any], method: str) -> AsyncIterator[None]:
    try:
        yield
    except errors.ServiceError as error:
        await errors.abort(context, error)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # The handler gave up by itself. grpc sends no status for that and the client would wait for ever.
        await errors.abort(context, errors.unavailable(f"{method} was abandoned by the server"))
    except (grpc.aio.AbortError, GeneratorExit):
        raise
    except Exception:
        log.exception("unforeseen failure", extra={"rpc_method": method})
        await errors.abort(context, errors.internal(f"{method} failed; the server's log says why"))


class Serving:
    """One gRPC server's life: build, start, run until a signal, drain.

    `health` is SERVING only between `set_ready(True)` and the start of the drain, for the server as a whole ("") and
    for each service by its full name.
    """

    def __init__(self, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()) -> None:
        self.server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[*interceptors, ErrorInterceptor()])
        self.health = health.aio.HealthServicer()
        self.port = 0
        self._service_names: tuple[str, ...] = ()
        self._stop = asyncio.Event()

    async def start(self, address: str, service_names: Sequence[str]) -> None:
        """Bind `address` ("host:port"; port 0 takes a free one) and accept calls, not yet ready.

        Raises OSError when the address cannot be bound.
        """
        self._service_names = ("", *service_names)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.server)
        try:
            self.port = self.server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error
        if self.port == 0:
            raise OSError(f"cannot listen on {address}")
        await self.set_ready(False)
        await self.server.start()

    async def set_ready(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._service_names:
            await self.health.set(name, status)

    def request_stop(self) -> None:
        self._stop.set()

    async def run_until_stopped(
        self, drain: Callable[[], Awaitable[None]] | None = None, grace_s: float = 10.0
    ) -> None:
        """Serve until SIGTERM, SIGINT or `request_stop()`; then NOT_SERVING, `drain()`, and up to `grace_s` for the
        calls in flight."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_stop)
        await self._stop.wait()
        await self.health.enter_graceful_shutdown()
        if drain is not None:
            await drain()
        await self.server.stop(grace_s)


def channel(address: str, interceptors: Sequence[grpc.aio.ClientInterceptor] = ()) -> grpc.aio.Channel:
    """An asyncio channel to `address` with the options that match our servers'."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS, interceptors=list(interceptors))
