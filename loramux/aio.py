"""The asyncio client.

from loramux.aio import AsyncClient

async with AsyncClient("localhost:50051") as client:
    async for delta in client.generate("Hello", adapter="sentiment"):
        print(delta.text, end="")
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
import grpc.aio

from loramux import requests, uploads
from loramux.base_stream import BaseStream
from loramux.chat_span import ChatSpan
from loramux.requests import Priority, Prompt, Sampling
from observability.interceptors import client_interceptors
from protos import (
    adapter_store_pb2,
    adapter_store_pb2_grpc,
    common_pb2,
    errors,
    gateway_pb2,
    gateway_pb2_grpc,
    serving,
)

_T = TypeVar("_T")


class AsyncStream(BaseStream):
    """`loramux.client.Stream` for `async for` and `async with`; the same contract and the same errors."""

    async def read(self) -> str:
        """Read to the end; the whole text."""
        async for _ in self:
            pass
        return self.text

    async def __aiter__(self) -> AsyncIterator[common_pb2.Delta]:
        try:
            async for event in self._call:
                delta = self._transcript.receive(event)
                if delta is not None:
                    yield delta
            self._transcript.end()
        except grpc.aio.AioRpcError as rpc_error:
            raise self._failed(errors.from_rpc_error(rpc_error)) from rpc_error
        except errors.ServiceError as error:
            self._failed(error)
            raise
        except asyncio.CancelledError:
            # grpc reports a call that was cancelled on this side as if the reading task had been.
            task = asyncio.current_task()
            if self._call.cancelled() and not (task and task.cancelling()):
                raise errors.ServiceError(grpc.StatusCode.CANCELLED, "the stream was cancelled") from None
            raise
        finally:
            self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        # grpc neither collects nor cancels a call that is dropped. Where the loop is gone, so is the call.
        if not self._call.done():
            self.cancel()


class AsyncAdapters:
    """What the adapter store holds, and changing it. Every method raises ServiceError."""

    def __init__(self, channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...]) -> None:
        self._stub = adapter_store_pb2_grpc.AdapterStoreStub(channel)
        self._metadata = metadata

    async def push(
        self,
        directory: str | Path,
        adapter_id: str,
        alias: str | None = None,
        progress: uploads.Progress | None = None,
    ) -> adapter_store_pb2.PutResponse:
        """Upload the adapter that PEFT saved in `directory`, and point `alias` at it. `progress` is told the bytes
        sent and the bytes in all."""
        upload = await asyncio.to_thread(uploads.prepare, directory, adapter_id, alias)
        return await _answer(self._stub.Put, upload.messages(progress), self._metadata)

    async def list(self, adapter_id: str | None = None) -> adapter_store_pb2.ListResponse:
        """All revisions and aliases, of one adapter or of all."""
        request = adapter_store_pb2.ListRequest(adapter_id=adapter_id or "")
        return await _answer(self._stub.List, request, self._metadata)

    async def alias(self, adapter_id: str, alias: str, revision: str | None) -> adapter_store_pb2.SetAliasResponse:
        """Point `alias` at `revision`; None removes it."""
        request = adapter_store_pb2.SetAliasRequest(adapter_id=adapter_id, alias=alias, revision=revision or "")
        return await _answer(self._stub.SetAlias, request, self._metadata)

    async def rm(self, adapter_id: str, revision: str | None = None) -> adapter_store_pb2.DeleteResponse:
        """Delete one revision; None deletes the adapter whole."""
        request = adapter_store_pb2.DeleteRequest(adapter_id=adapter_id, revision=revision or "")
        return await _answer(self._stub.Delete, request, self._metadata)


class AsyncClient:
    """`loramux.client.Client` for asyncio. Make it, use it and close it in one event loop."""

    def __init__(
        self,
        gateway: str = "localhost:50051",
        *,
        adapter_store: str = "localhost:50071",
        api_key: str | None = None,
    ) -> None:
        self._api_key = api_key
        credentials = requests.metadata(api_key, None)
        gateway_channel, store_channel = (
            serving.channel(address, client_interceptors()) for address in (gateway, adapter_store)
        )
        self._channels = (gateway_channel, store_channel)
        self._stub = gateway_pb2_grpc.GenerationStub(gateway_channel)
        self.adapters = AsyncAdapters(store_channel, credentials)

    def generate(
        self,
        prompt: Prompt,
        *,
        adapter: str | None = None,
        revision: str | None = None,
        alias: str | None = None,
        priority: Priority = "normal",
        timeout_s: float | None = None,
        api_key: str | None = None,
        request_id: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> AsyncStream:
        """Start a generation, as `loramux.client.Client.generate` does. Nothing to await: iterate the stream."""
        request = requests.generate_request(
            prompt, adapter=adapter, revision=revision, alias=alias, priority=priority, sampling=sampling
        )
        metadata = requests.metadata(api_key or self._api_key, request_id)
        span = ChatSpan(request)
        with span.current():
            call = self._stub.Generate(request, timeout=timeout_s, metadata=metadata)
        return AsyncStream(call, span)

    async def models(self) -> gateway_pb2.ListModelsResponse:
        """The base model, the adapters and the replicas, as the gateway knows them now. Raises ServiceError."""
        metadata = requests.metadata(self._api_key, None)
        return await _answer(self._stub.ListModels, gateway_pb2.ListModelsRequest(), metadata)

    async def close(self) -> None:
        """End every call and connection."""
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()


async def _answer(method: Callable[..., Awaitable[_T]], request: object, metadata: tuple[tuple[str, str], ...]) -> _T:
    call: Any = method(request, metadata=metadata)
    try:
        answer: _T = await call
        return answer
    except grpc.aio.AioRpcError as error:
        raise errors.from_rpc_error(error) from error
    finally:
        call.cancel()
