"""Keeps the catalog as the adapter store has it: a snapshot at every connection, then each change."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from gateway.catalog import Catalog
from gateway.request import AdapterRef
from observability import logs
from protos import adapter_store_pb2 as pb
from protos import adapter_store_pb2_grpc, common_pb2, serving

log = logs.get(__name__)
_RECONNECT_S = 0.2


class StoreWatch:
    """Follows one store's Watch stream into `catalog` until closed."""

    def __init__(self, address: str, catalog: Catalog) -> None:
        self._address = address
        self._catalog = catalog
        self._version = 0
        self.loaded = asyncio.Event()  # set once a first snapshot is in

    async def run(self) -> None:
        """Until cancelled. While the store is away the last snapshot stands."""
        async with serving.channel(self._address) as channel:
            stub: Any = adapter_store_pb2_grpc.AdapterStoreStub(channel)
            while True:
                call = stub.Watch(pb.WatchRequest(), wait_for_ready=True)
                try:
                    async for event in call:
                        if not self._apply(event):
                            log.warning("catalog events missed", store=self._address, version=event.version)
                            break
                except grpc.aio.AioRpcError as error:
                    log.warning("adapter store lost", store=self._address, code=error.code().name)
                finally:
                    call.cancel()
                await asyncio.sleep(_RECONNECT_S)

    def _apply(self, event: pb.CatalogEvent) -> bool:
        """False when an event before this one was missed, so that only a new snapshot helps."""
        kind = event.WhichOneof("event")
        if kind == "snapshot":
            self._catalog.replace(
                [(_ref(revision.ref), _created_s(revision)) for revision in event.snapshot.revisions],
                [(AdapterRef(a.adapter_id, a.revision), a.alias) for a in event.snapshot.aliases],
            )
            self.loaded.set()
        elif event.version != self._version + 1:
            return False
        elif kind == "put":
            self._catalog.put(_ref(event.put.ref), _created_s(event.put))
        elif kind == "deleted":
            self._catalog.delete(_ref(event.deleted))
        elif kind == "alias_set":
            alias = event.alias_set
            self._catalog.set_alias(AdapterRef(alias.adapter_id, alias.revision), alias.alias)
        self._version = event.version
        return True


def _ref(ref: common_pb2.AdapterRef) -> AdapterRef:
    return AdapterRef(ref.adapter_id, ref.revision)


def _created_s(revision: pb.AdapterRevision) -> float:
    return revision.created.seconds + revision.created.nanos / 1e9
