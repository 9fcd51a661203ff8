"""The gateway put together: what its parts are, and in which order they come up and go down."""

from __future__ import annotations

import asyncio

from gateway.catalog import Catalog
from gateway.config import GatewayConfig
from gateway.dispatcher import Dispatcher
from gateway.forwarder import Forwarder
from gateway.queue import RequestQueue
from gateway.replicas import Replicas
from gateway.servicer import SERVICE_NAME, GenerationServicer
from gateway.store_watch import StoreWatch
from gateway.tenants import Tenants
from observability import logs
from observability.interceptors import ServerTelemetryInterceptor
from observability.metrics import GatewayMetrics, RequestMetrics
from protos import gateway_pb2_grpc
from protos.serving import Serving

log = logs.get(__name__)


class Gateway:
    def __init__(self, config: GatewayConfig) -> None:
        metrics = GatewayMetrics()
        self._config = config
        self.catalog = Catalog()
        self.store = StoreWatch(config.adapter_store, self.catalog)
        self.replicas = Replicas(config.replicas, config.max_outstanding)
        queue = RequestQueue(config.queue_limit, config.promote_after_s)
        self.dispatcher = Dispatcher(queue, self.replicas, config.replica_wait_s, metrics)
        self.serving = Serving([ServerTelemetryInterceptor()])
        self.address = ""  # once it accepts calls
        gateway_pb2_grpc.add_GenerationServicer_to_server(
            GenerationServicer(
                Tenants(config.api_keys),
                self.catalog,
                self.replicas,
                self.dispatcher,
                Forwarder(self.dispatcher, config.max_attempts, metrics),
                RequestMetrics(),
            ),
            self.serving.server,
        )

    async def start(self) -> None:
        """Accept calls, not ready yet. Raises OSError when the address is taken."""
        await self.serving.start(self._config.listen, [SERVICE_NAME])
        self.address = f"{self._config.listen.rpartition(':')[0]}:{self.serving.port}"
        log.info("serving", address=self.address)

    async def run(self) -> None:
        """Serve until a signal or `serving.request_stop()`, then drain. Ready once the store's catalog is in."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) for part in (self.store.run(), self.replicas.run(), self._become_ready())]
            await self.serving.run_until_stopped(grace_s=self._config.drain_grace_s)
            for task in tasks:
                task.cancel()

    async def _become_ready(self) -> None:
        await self.store.loaded.wait()
        await self.serving.set_ready(True)
        log.info("ready", adapters=len(self.catalog))
