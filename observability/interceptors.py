"""One span per RPC on either side of a connection, for asyncio and for synchronous channels.

The server's span is the current one for its handler, so spans and logs below find their parent. It is attached in the
RPC's own task and never detached: the task ends with the RPC, and there is no token to reset in a wrong context.
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind

from observability import logs, spans

REQUEST_ID_KEY = "x-request-id"
_REQUEST_ID_LIMIT = 128
# Watches live as long as the process, health checks and reflection are not requests: a span each says nothing.
_SILENT_SERVICES = ("/grpc.health.", "/grpc.reflection.")
# By the conventions a server's span fails only where the server is at fault.
_SERVER_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})

_Context = grpc.aio.ServicerContext[Any, Any]


class ServerTelemetryInterceptor(grpc.aio.ServerInterceptor):
    """A SERVER span per RPC, and its `x-request-id` (made up where missing) bound to the logs.

    Place it first, so that it sees the status every other interceptor leads to.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None or _silent(method):
            return handler
        metadata = handler_call_details.invocation_metadata or ()

        async def unary(request: Any, context: _Context) -> Any:
            rpc = _ServerRpc(method, metadata, context)
            try:
                return await inner(request, context)
            except BaseException as error:
                rpc.error = error
                raise
            finally:
                rpc.end()

        async def stream(request: Any, context: _Context) -> None:
            # Writes by itself instead of yielding: a cancel that hits a write then unwinds through here, and the
            # handler is closed in its own task and context.
            rpc = _ServerRpc(method, metadata, context)
            try:
                responses = inner(request, context)
                if inspect.isawaitable(responses):
                    await responses
                    return
                try:
                    async for response in responses:
                        await context.write(response)
                finally:
                    await responses.aclose()
            except BaseException as error:
                rpc.error = error
                raise
            finally:
                rpc.end()

        kind = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        inner = getattr(handler, kind)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(
            stream if handler.response_streaming else unary,
            handler.request_deserializer,
            handler.response_serializer,
        )


class _ServerRpc:
    """The span of one RPC being served; current from here on in this task."""

    def __init__(self, method: str, metadata: spans.Metadata, context: _Context) -> None:
        pairs = [(str(key), value) for key, value in metadata]
        given = next((value for key, value in pairs if key == REQUEST_ID_KEY and isinstance(value, str)), "")
        request_id = given[:_REQUEST_ID_LIMIT] or uuid.uuid4().hex
        parent = spans.extract(pairs)
        self._context = context
        self.error: BaseException | None = None
        self._span = spans.start(
            method.removeprefix("/"), SpanKind.SERVER, parent, {**_rpc_attributes(method), spans.REQUEST_ID: request_id}
        )
        otel_context.attach(trace.set_span_in_context(self._span, parent))
        logs.bind_request(request_id)

    def end(self) -> None:
        code = self._code()
        error = self.error
        self._span.set_attribute(spans.RPC_STATUS, code)
        if isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
            self._span.record_exception(error)
        if code in _SERVER_FAULTS:
            spans.end(self._span, code)
        else:
            if code != "OK":
                self._span.set_attribute(spans.ERROR_TYPE, code)
            self._span.end()

    def _code(self) -> str:
        if self.error is None or isinstance(self.error, grpc.aio.AbortError):
            return _code_name(self._context.code())
        if isinstance(self.error, asyncio.CancelledError):
            remaining = self._context.time_remaining()
            return "DEADLINE_EXCEEDED" if remaining is not None and remaining <= 0 else "CANCELLED"
        return "UNKNOWN"


class UnaryUnaryTelemetry(grpc.aio.UnaryUnaryClientInterceptor):
    """A CLIENT span per unary call."""

    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        return await _intercept(continuation, client_call_details, request)


class UnaryStreamTelemetry(grpc.aio.UnaryStreamClientInterceptor):
    """A CLIENT span per call with a streamed answer; ends with the call, also when that is dropped unread."""

    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        return _StreamCall(await _intercept(continuation, client_call_details, request))


class StreamUnaryTelemetry(grpc.aio.StreamUnaryClientInterceptor):
    """A CLIENT span per call with a streamed request."""

    async def intercept_stream_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request_iterator: Any
    ) -> Any:
        return await _intercept(continuation, client_call_details, request_iterator)


def client_interceptors() -> Sequence[grpc.aio.ClientInterceptor]:
    """What an asyncio channel needs for one span per call and the trace context in its metadata."""
    return (UnaryUnaryTelemetry(), UnaryStreamTelemetry(), StreamUnaryTelemetry())


async def _intercept(continuation: Callable[..., Any], details: Any, request: Any) -> Any:
    method = _text(details.method)
    if _silent(method):
        return await continuation(details, request)
    span, metadata = _start_client(method, details.metadata)
    try:
        call = await continuation(details._replace(metadata=grpc.aio.Metadata(*metadata)), request)
    except BaseException as error:
        _end_client(span, _code_of(error))
        raise
    loop = asyncio.get_running_loop()

    def done(finished: Any) -> None:
        # `code()` is a coroutine even on a finished call.
        task = loop.create_task(finished.code())
        pending.add(task)
        task.add_done_callback(ended)

    def ended(task: asyncio.Task[Any]) -> None:
        pending.discard(task)
        _end_client(span, "CANCELLED" if task.cancelled() else _code_name(task.result()))

    pending: set[asyncio.Task[Any]] = set()
    call.add_done_callback(done)
    return call


class _StreamCall(grpc.aio.UnaryStreamCall[Any, Any]):
    """The call, with the done callbacks of whoever holds it kept here instead of on the call itself.

    grpc keeps a running call alive, and with it its callbacks, one of which is the channel's and holds the caller's own
    handle: without this step between, a stream dropped unread is never collected and never cancelled.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._callbacks: list[Callable[[Any], None]] = []
        this = weakref.ref(self)

        def done(_: Any) -> None:
            alive = this()
            if alive is not None:
                for callback in alive._callbacks:
                    callback(alive)

        call.add_done_callback(done)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self._call.done():
            callback(self)
        else:
            self._callbacks.append(callback)

    def __aiter__(self) -> AsyncIterator[Any]:
        iterator: AsyncIterator[Any] = self._call.__aiter__()
        return iterator

    async def read(self) -> Any:
        return await self._call.read()

    def cancel(self) -> bool:
        return bool(self._call.cancel())

    def cancelled(self) -> bool:
        return bool(self._call.cancelled())

    def done(self) -> bool:
        return bool(self._call.done())

    def time_remaining(self) -> float | None:
        remaining: float | None = self._call.time_remaining()
        return remaining

    async def initial_metadata(self) -> Any:
        return await self._call.initial_metadata()

    async def trailing_metadata(self) -> Any:
        return await self._call.trailing_metadata()

    async def code(self) -> Any:
        return await self._call.code()

    async def details(self) -> Any:
        return await self._call.details()

    async def wait_for_connection(self) -> None:
        await self._call.wait_for_connection()


@dataclass(frozen=True)
class _CallDetails(grpc.ClientCallDetails):
    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class SyncClientTelemetry(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
):
    """The same for synchronous channels: `grpc.intercept_channel(channel, SyncClientTelemetry())`."""

    def intercept_unary_unary(self, continuation: Callable[..., Any], client_call_details: Any, request: Any) -> Any:
        return _intercept_sync(continuation, client_call_details, request)

    def intercept_stream_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request_iterator: Any
    ) -> Any:
        return _intercept_sync(continuation, client_call_details, request_iterator)

    def intercept_unary_stream(self, continuation: Callable[..., Any], client_call_details: Any, request: Any) -> Any:
        return _SyncStream(_intercept_sync(continuation, client_call_details, request))


class _SyncStream:
    """A streamed answer that cancels its call when dropped: grpc keeps a call alive while it has a done callback."""

    def __init__(self, call: Any) -> None:
        self._call = call
        weakref.finalize(self, call.cancel)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


def _intercept_sync(continuation: Callable[..., Any], details: Any, request: Any) -> Any:
    method = _text(details.method)
    if _silent(method):
        return continuation(details, request)
    span, metadata = _start_client(method, details.metadata)
    try:
        call = continuation(
            _CallDetails(
                details.method,
                details.timeout,
                metadata,
                details.credentials,
                details.wait_for_ready,
                details.compression,
            ),
            request,
        )
    except BaseException as error:
        _end_client(span, _code_of(error))
        raise
    call.add_done_callback(lambda finished: _end_client(span, _code_name(finished.code())))
    return call


def _start_client(method: str, metadata: spans.Metadata | None) -> tuple[Span, Any]:
    span = spans.start(method.removeprefix("/"), SpanKind.CLIENT, None, _rpc_attributes(method))
    return span, spans.inject(metadata, trace.set_span_in_context(span))


def _end_client(span: Span, code: str) -> None:
    if not span.is_recording():
        return
    span.set_attribute(spans.RPC_STATUS, code)
    spans.end(span, None if code == "OK" else code)


def _rpc_attributes(method: str) -> spans.Attributes:
    return {spans.RPC_SYSTEM: "grpc", spans.RPC_METHOD: method.removeprefix("/")}


def _silent(method: str) -> bool:
    return method.startswith(_SILENT_SERVICES) or method.rpartition("/")[2].startswith("Watch")


def _text(method: str | bytes) -> str:
    return method.decode() if isinstance(method, bytes) else method


def _code_of(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "CANCELLED"
    return _code_name(error.code()) if isinstance(error, grpc.RpcError) else "UNKNOWN"


def _code_name(code: Any) -> str:
    """The name of a status given as grpc.StatusCode, as its number (the asyncio server's form), or not yet set."""
    if code is None:
        return "OK"
    if isinstance(code, grpc.StatusCode):
        return code.name
    return next((known.name for known in grpc.StatusCode if known.value[0] == code), "UNKNOWN")
