"""AdapterStore over gRPC: proto ↔ domain, and nothing else. Blocking work runs on threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, BinaryIO

import grpc.aio

from adapter_store.records import Alias, Change, Deleted, Revision, StoredFile
from adapter_store.store import AdapterStore
from adapter_store.subscription import Subscription
from protos import adapter_store_pb2 as pb
from protos import adapter_store_pb2_grpc, common_pb2
from protos.adapter_format import check_alias
from protos.errors import invalid_argument
from protos.serving import CHUNK_BYTES

_Context = grpc.aio.ServicerContext[Any, Any]


class AdapterStoreServicer(adapter_store_pb2_grpc.AdapterStoreServicer):
    def __init__(self, store: AdapterStore, watch_queue: int) -> None:
        self._store = store
        self._watch_queue = watch_queue
        self._watches: set[Subscription] = set()
        self._stopping = False

    async def drain(self) -> None:
        """End the Watch streams, which never end by themselves, with UNAVAILABLE."""
        self._stopping = True
        for subscription in self._watches:
            subscription.close()

    async def Put(self, request_iterator: AsyncIterator[pb.PutRequest], context: _Context) -> pb.PutResponse:  # noqa: N802
        upload = None
        try:
            async for request in request_iterator:
                match request.WhichOneof("part"):
                    case "header" if upload is None:
                        header = request.header
                        files = [StoredFile(file.name, file.size, file.sha256) for file in header.files]
                        upload = self._store.begin_put(header.adapter_id, files, header.alias)
                    case "chunk" if upload is not None:
                        if len(request.chunk) > CHUNK_BYTES:
                            raise invalid_argument("chunk", f"more than {CHUNK_BYTES} bytes")
                        await asyncio.to_thread(upload.write, request.chunk)
                    case _:
                        raise invalid_argument("part", "one header comes first, then only chunks")
            if upload is None:
                raise invalid_argument("header", "the stream ended before it")
            revision, created = await asyncio.to_thread(upload.commit)
            return pb.PutResponse(revision=_revision(revision), created=created)
        finally:
            if upload is not None:
                await asyncio.shield(asyncio.to_thread(upload.discard))

    async def Get(self, request: pb.GetRequest, context: _Context) -> pb.AdapterRevision:  # noqa: N802
        version = request.WhichOneof("version")
        if version is not None and not getattr(request, version):
            raise invalid_argument(version, "must not be empty; leave it unset for the newest revision")
        return _revision(
            await asyncio.to_thread(self._store.catalog.get, request.adapter_id, request.revision, request.alias)
        )

    async def List(self, request: pb.ListRequest, context: _Context) -> pb.ListResponse:  # noqa: N802
        return await asyncio.to_thread(self._list, request.adapter_id)

    async def Fetch(self, request: pb.FetchRequest, context: _Context) -> AsyncIterator[pb.FetchResponse]:  # noqa: N802
        revision, files = await asyncio.to_thread(self._store.open, request.ref.adapter_id, request.ref.revision)
        try:
            yield pb.FetchResponse(header=pb.FetchHeader(revision=_revision(revision)))
            for file in files:
                while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                    yield pb.FetchResponse(chunk=chunk)
        finally:
            _close(files)

    async def Delete(self, request: pb.DeleteRequest, context: _Context) -> pb.DeleteResponse:  # noqa: N802
        count = await asyncio.to_thread(self._store.delete, request.adapter_id, request.revision)
        return pb.DeleteResponse(deleted_revisions=count)

    async def SetAlias(self, request: pb.SetAliasRequest, context: _Context) -> pb.SetAliasResponse:  # noqa: N802
        check_alias(request.alias)
        alias = Alias(request.adapter_id, request.alias, request.revision)
        return pb.SetAliasResponse(previous_revision=await asyncio.to_thread(self._store.catalog.set_alias, alias))

    async def Watch(self, request: pb.WatchRequest, context: _Context) -> AsyncIterator[pb.CatalogEvent]:  # noqa: N802
        subscription = Subscription(asyncio.get_running_loop(), self._watch_queue)
        self._watches.add(subscription)
        if self._stopping:
            subscription.close()
        try:
            while True:
                yield await asyncio.to_thread(self._snapshot_event, subscription)
                while change := await subscription.next():
                    yield _change_event(change)
        finally:
            self._watches.discard(subscription)
            subscription.close()

    # A full catalog takes tenths of a second to turn into a message: these two run on threads.

    def _list(self, adapter_id: str) -> pb.ListResponse:
        snapshot = self._store.catalog.snapshot(adapter_id)
        return pb.ListResponse(revisions=map(_revision, snapshot.revisions), aliases=map(_alias, snapshot.aliases))

    def _snapshot_event(self, subscription: Subscription) -> pb.CatalogEvent:
        snapshot = self._store.catalog.attach(subscription)
        content = pb.CatalogEvent.Snapshot(
            revisions=map(_revision, snapshot.revisions), aliases=map(_alias, snapshot.aliases)
        )
        return pb.CatalogEvent(version=snapshot.version, snapshot=content)


def _close(files: Iterable[BinaryIO]) -> None:
    for file in files:
        file.close()


def _revision(revision: Revision) -> pb.AdapterRevision:
    message = pb.AdapterRevision(
        ref=common_pb2.AdapterRef(adapter_id=revision.adapter_id, revision=revision.revision),
        files=[pb.FileEntry(**vars(file)) for file in revision.files],
        base_model=revision.base_model,
        max_rank=revision.max_rank,
        target_modules=revision.target_modules,
        num_parameters=revision.num_parameters,
    )
    message.created.FromNanoseconds(int(revision.created_s * 1e9))
    return message


def _alias(alias: Alias) -> pb.Alias:
    return pb.Alias(**vars(alias))


def _change_event(change: Change) -> pb.CatalogEvent:
    match change.what:
        case Revision() as revision:
            return pb.CatalogEvent(version=change.version, put=_revision(revision))
        case Alias() as alias:
            return pb.CatalogEvent(version=change.version, alias_set=_alias(alias))
        case Deleted(adapter_id, revision_id):
            ref = common_pb2.AdapterRef(adapter_id=adapter_id, revision=revision_id)
            return pb.CatalogEvent(version=change.version, deleted=ref)
