"""The model servers: one channel each, and two streams that push whether it is healthy and how it stands."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.request import AdapterRef
from gateway.routing import ReplicaLoad
from observability import logs
from observability.interceptors import client_interceptors
from protos import model_server_pb2 as pb
from protos import model_server_pb2_grpc, serving

log = logs.get(__name__)
_RECONNECT_S = 0.1


class Replica:
    """One model server as it was last heard of. Ready: healthy, its status known, not draining."""

    def __init__(self, address: str, max_outstanding: int, on_change: Callable[[], None]) -> None:
        self.load = ReplicaLoad(address, max_outstanding)
        self.status = pb.ReplicaStatus()
        self._on_change = on_change
        self._healthy = False
        self._known = False
        self._channel = serving.channel(address, client_interceptors())
        self.stub: Any = model_server_pb2_grpc.ModelServerStub(self._channel)

    async def run(self) -> None:
        """Follow both streams until cancelled."""
        health: Any = health_pb2_grpc.HealthStub(self._channel)
        request = health_pb2.HealthCheckRequest()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow(lambda: health.Watch(request, wait_for_ready=True), self._on_health))
                group.create_task(
                    self._follow(
                        lambda: self.stub.WatchStatus(pb.WatchStatusRequest(), wait_for_ready=True), self._on_status
                    )
                )
        finally:
            await self._channel.close()

    async def _follow(self, watch: Callable[[], Any], on_message: Callable[[Any], None]) -> None:
        """Messages to `on_message`, None when the stream is lost; the channel reconnects within a second."""
        while True:
            call = watch()
            try:
                async for message in call:
                    on_message(message)
            except grpc.aio.AioRpcError as error:
                log.debug("replica stream lost", replica=self.load.address, code=error.code().name)
            finally:
                call.cancel()
            on_message(None)
            await asyncio.sleep(_RECONNECT_S)

    def _on_health(self, response: health_pb2.HealthCheckResponse | None) -> None:
        self._healthy = response is not None and response.status == health_pb2.HealthCheckResponse.SERVING
        self._changed()

    def _on_status(self, status: pb.ReplicaStatus | None) -> None:
        self._known = status is not None
        if status is not None:
            self.status = status
            self.load.resident = frozenset(AdapterRef(r.adapter_id, r.revision) for r in status.resident_adapters)
        self._changed()

    def _changed(self) -> None:
        ready = self._healthy and self._known and not self.status.draining
        if ready != self.load.ready:
            self.load.last_ready_s = time.monotonic()
            self.load.ready = ready
            log.info("replica ready" if ready else "replica not ready", replica=self.load.address)
            self._on_change()


class Replicas:
    """All model servers of this gateway; `on_change` is called when one becomes ready or stops being so."""

    def __init__(self, addresses: Sequence[str], max_outstanding: int) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._by_address = {
            address: Replica(address, max_outstanding, lambda: self.on_change()) for address in addresses
        }

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._by_address.values())

    def __getitem__(self, address: str) -> Replica:
        return self._by_address[address]

    @property
    def loads(self) -> list[ReplicaLoad]:
        return [replica.load for replica in self]

    @property
    def context_length(self) -> int:
        """Of the base model; 0 until a replica has told."""
        return next(filter(None, (replica.status.context_length for replica in self)), 0)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for replica in self:
                group.create_task(replica.run())
