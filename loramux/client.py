"""The blocking client.

from loramux import Client

client = Client("localhost:50051")
for delta in client.generate("Hello", adapter="sentiment"):
    print(delta.text, end="")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc

from loramux import requests, uploads
from loramux.base_stream import BaseStream
from loramux.chat_span import ChatSpan
from loramux.requests import Priority, Prompt, Sampling
from observability.interceptors import SyncClientTelemetry
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


class Stream(BaseStream):
    """One generation. Iterate it for its deltas; leaving the loop, the `with` block or the stream itself cancels it.

    Iterating raises ServiceError: what the servers report, or INTERNAL where the stream breaks its contract, which
    includes ending without Finished.
    """

    def read(self) -> str:
        """Read to the end; the whole text."""
        for _ in self:
            pass
        return self.text

    def __iter__(self) -> Iterator[common_pb2.Delta]:
        try:
            for event in self._call:
                delta = self._transcript.receive(event)
                if delta is not None:
                    yield delta
            self._transcript.end()
        except grpc.RpcError as rpc_error:
            raise self._failed(errors.from_rpc_error(rpc_error)) from rpc_error
        except errors.ServiceError as error:
            self._failed(error)
            raise
        finally:
            self.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()


class Adapters:
    """What the adapter store holds, and changing it. Every method raises ServiceError."""

    def __init__(self, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...]) -> None:
        self._stub = adapter_store_pb2_grpc.AdapterStoreStub(channel)
        self._metadata = metadata

    def push(
        self,
        directory: str | Path,
        adapter_id: str,
        alias: str | None = None,
        progress: uploads.Progress | None = None,
    ) -> adapter_store_pb2.PutResponse:
        """Upload the adapter that PEFT saved in `directory`, and point `alias` at it. `progress` is told the bytes
        sent and the bytes in all, from another thread."""
        upload = uploads.prepare(directory, adapter_id, alias)
        return _answer(self._stub.Put, upload.messages(progress), self._metadata)

    def list(self, adapter_id: str | None = None) -> adapter_store_pb2.ListResponse:
        """All revisions and aliases, of one adapter or of all."""
        return _answer(self._stub.List, adapter_store_pb2.ListRequest(adapter_id=adapter_id or ""), self._metadata)

    def alias(self, adapter_id: str, alias: str, revision: str | None) -> adapter_store_pb2.SetAliasResponse:
        """Point `alias` at `revision`; None removes it."""
        request = adapter_store_pb2.SetAliasRequest(adapter_id=adapter_id, alias=alias, revision=revision or "")
        return _answer(self._stub.SetAlias, request, self._metadata)

    def rm(self, adapter_id: str, revision: str | None = None) -> adapter_store_pb2.DeleteResponse:
        """Delete one revision; None deletes the adapter whole."""
        request = adapter_store_pb2.DeleteRequest(adapter_id=adapter_id, revision=revision or "")
        return _answer(self._stub.Delete, request, self._metadata)


class Client:
    """Calls a gateway, and for `adapters` its adapter store. Connects when first used; safe to share among threads."""

    def __init__(
        self,
        gateway: str = "localhost:50051",
        *,
        adapter_store: str = "localhost:50071",
        api_key: str | None = None,
    ) -> None:
        self._api_key = api_key
        credentials = requests.metadata(api_key, None)
        self._channels = [grpc.insecure_channel(a, options=serving.CHANNEL_OPTIONS) for a in (gateway, adapter_store)]
        gateway_channel, store_channel = (grpc.intercept_channel(c, SyncClientTelemetry()) for c in self._channels)
        self._stub = gateway_pb2_grpc.GenerationStub(gateway_channel)
        self.adapters = Adapters(store_channel, credentials)

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
    ) -> Stream:
        """Start a generation. `prompt` is text, token ids, or chat messages ({"role": …, "content": …}).

        `adapter` None asks for the base model; without `revision` or `alias`, an adapter's newest revision answers.
        Raises ServiceError INVALID_ARGUMENT for what cannot be sent; all else comes from the stream.
        """
        request = requests.generate_request(
            prompt, adapter=adapter, revision=revision, alias=alias, priority=priority, sampling=sampling
        )
        metadata = requests.metadata(api_key or self._api_key, request_id)
        span = ChatSpan(request)
        with span.current():
            call = self._stub.Generate(request, timeout=timeout_s, metadata=metadata)
        return Stream(call, span)

    def models(self) -> gateway_pb2.ListModelsResponse:
        """The base model, the adapters and the replicas, as the gateway knows them now. Raises ServiceError."""
        metadata = requests.metadata(self._api_key, None)
        return _answer(self._stub.ListModels, gateway_pb2.ListModelsRequest(), metadata)

    def close(self) -> None:
        """End every call and connection."""
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _answer(method: Callable[..., _T], request: object, metadata: tuple[tuple[str, str], ...]) -> _T:
    try:
        return method(request, metadata=metadata)
    except grpc.RpcError as error:
        raise errors.from_rpc_error(error) from error
