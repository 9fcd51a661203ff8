"""`python -m adapter_store`: settings, telemetry, serve."""

from __future__ import annotations

import asyncio

import structlog

from adapter_store.blobs import Blobs
from adapter_store.catalog import Catalog
from adapter_store.config import Settings
from adapter_store.servicer import AdapterStoreServicer
from adapter_store.store import AdapterStore
from observability import telemetry
from observability.interceptors import ServerTelemetryInterceptor
from protos.adapter_store_pb2 import DESCRIPTOR
from protos.adapter_store_pb2_grpc import add_AdapterStoreServicer_to_server
from protos.serving import Serving


async def serve(settings: Settings) -> None:
    blobs = Blobs(settings.data_dir)
    store = AdapterStore(
        Catalog(settings.catalog_url, settings.max_catalog_bytes), blobs, max_adapter_bytes=settings.max_adapter_bytes
    )
    servicer = AdapterStoreServicer(store, settings.watch_queue)
    serving = Serving([ServerTelemetryInterceptor()])
    add_AdapterStoreServicer_to_server(servicer, serving.server)
    try:
        await serving.start(settings.listen, [DESCRIPTOR.services_by_name["AdapterStore"].full_name])
        await serving.set_ready(True)
        host = settings.listen.rpartition(":")[0]
        structlog.get_logger().info("serving", address=f"{host}:{serving.port}", data_dir=str(settings.data_dir))
        await serving.run_until_stopped(servicer.drain)
    finally:
        store.close()


def main() -> None:
    settings = Settings()
    tracing = telemetry.setup(
        "adapter_store", otlp_endpoint=settings.otlp_endpoint or None, log_level=settings.log_level
    )
    try:
        asyncio.run(serve(settings))
    finally:
        tracing.shutdown()


if __name__ == "__main__":
    main()
