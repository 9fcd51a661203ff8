"""One adapter from the store to a local directory, verified on the way."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from model_server.request import AdapterRef
from protos import adapter_format, adapter_store_pb2, common_pb2, errors
from protos.adapter_store_pb2_grpc import AdapterStoreStub

_RETRY_AFTER_S = 1.0


async def fetch(store: AdapterStoreStub, ref: AdapterRef, directory: Path) -> None:
    """Write the files of `ref` into `directory`, each file's digest and the revision's own checked.

    Raises ServiceError: what the store reported, or UNAVAILABLE when it cannot be reached or sent something else.
    """
    try:
        digests = await _receive(store, ref, directory)
    except grpc.aio.AioRpcError as error:
        reported = errors.from_rpc_error(error)
        if reported.code is grpc.StatusCode.UNAVAILABLE and not reported.details:
            # Said by gRPC, of the connection: passed on as it is, it would be taken for the model server's own.
            reported = errors.unavailable(f"the adapter store cannot be reached: {reported.message}", _RETRY_AFTER_S)
        raise reported from error
    revision = adapter_format.revision_digest(digests)
    if revision != ref.revision:
        raise errors.unavailable(f"the store sent {revision} for {ref.adapter_id}@{ref.revision}")


async def _receive(store: AdapterStoreStub, ref: AdapterRef, directory: Path) -> list[tuple[str, str]]:
    """The files' (name, sha256)."""
    request = adapter_store_pb2.FetchRequest(
        ref=common_pb2.AdapterRef(adapter_id=ref.adapter_id, revision=ref.revision)
    )
    digests: list[tuple[str, str]] = []
    call: Any = store.Fetch(request)  # the stub's types are those of blocking calls
    responses: AsyncIterator[adapter_store_pb2.FetchResponse] = aiter(call)
    try:
        header = await anext(responses, None)
        if header is None or not header.HasField("header"):
            raise errors.unavailable(f"the store sent no header for {ref.adapter_id}@{ref.revision}")
        rest = b""
        for entry in header.header.revision.files:
            if entry.name not in (adapter_format.CONFIG_FILE, adapter_format.TENSORS_FILE):
                raise errors.unavailable(f"the store sent a file named {errors.quote(entry.name)}")
            digest, missing = hashlib.sha256(), entry.size
            with (directory / entry.name).open("wb") as file:
                while missing:
                    if not rest:
                        message = await anext(responses, None)
                        if message is None:
                            raise errors.unavailable(f"the store's answer ends inside {entry.name}")
                        rest = message.chunk
                    piece, rest = rest[:missing], rest[missing:]
                    missing -= len(piece)
                    digest.update(piece)
                    await asyncio.to_thread(file.write, piece)
            if digest.hexdigest() != entry.sha256:
                raise errors.unavailable(f"the store sent {entry.name} of {ref.adapter_id} with a wrong digest")
            digests.append((entry.name, digest.hexdigest()))
    finally:
        call.cancel()
    return digests
