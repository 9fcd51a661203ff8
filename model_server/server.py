"""Puts the model server together: adapter cache, engine process, service; runs it until it is told to stop."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from model_server import messages
from model_server.adapter_cache import AdapterCache
from model_server.bridge import Bridge
from model_server.config import Config
from model_server.intake import Intake
from model_server.request import AdapterRef
from model_server.servicer import Servicer
from model_server.weights import open_model
from observability import logs
from observability.interceptors import ServerTelemetryInterceptor
from observability.metrics import EngineMetrics
from protos import errors, model_server_pb2, serving
from protos.adapter_store_pb2_grpc import AdapterStoreStub
from protos.model_server_pb2_grpc import add_ModelServerServicer_to_server

log = logs.get(__name__)

_SERVICE = model_server_pb2.DESCRIPTOR.services_by_name["ModelServer"].full_name


class _Fetches:
    """Answers the engine's AdapterWanted: where it lies on disk, fetched there first if that was asked for; keeps the files
    until the engine is done with them."""

    def __init__(self, cache: AdapterCache) -> None:
        self._cache = cache
        self._tasks: set[asyncio.Task[None]] = set()
        self.bridge: Bridge | None = None

    def start(self, ref: AdapterRef, download: bool) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(ref, download))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, ref: AdapterRef, download: bool) -> None:
        assert self.bridge is not None
        try:
            path = await (self._cache.ensure(ref) if download else self._cache.find(ref))
        except errors.ServiceError as error:
            failure = messages.Failure(error.code.name, error.message, error.to_status().SerializeToString())
        except Exception as error:  # a full disk, say: its requests fail, the server goes on
            log.exception("adapter_fetch_failed", adapter_id=ref.adapter_id)
            failure = messages.Failure("UNAVAILABLE", f"adapter {ref.adapter_id} cannot be fetched: {error}")
        else:
            if path is None:
                self.bridge.adapter_missing(ref)
            else:
                self.bridge.adapter_fetched(ref, str(path))
            return
        log.warning("adapter_fetch_failed", adapter_id=ref.adapter_id, revision=ref.revision, error=failure.message)
        self.bridge.adapter_failed(ref, failure)

    def done(self, ref: AdapterRef, readable: bool) -> None:
        self._cache.release(ref, readable)


async def serve(config: Config, on_ready: Callable[[serving.Serving], None] = lambda server: None) -> int:
    """Serve until a signal. The exit code: 0 after a drain, 1 when the engine died.

    `on_ready` gets the server once it is SERVING: its port, and how to stop it without a signal.
    """
    store_channel = serving.channel(config.adapter_store) if config.adapter_store else None
    store = AdapterStoreStub(store_channel) if store_channel is not None else None
    fetches = _Fetches(AdapterCache(config.cache_dir.expanduser(), config.cache_bytes, store))
    bridge = Bridge(config, on_adapter_wanted=fetches.start, on_adapter_done=fetches.done)
    fetches.bridge = bridge
    progress = _Progress()
    try:
        info, tokenizer = await asyncio.gather(
            bridge.start(progress), asyncio.to_thread(lambda: open_model(config.model).tokenizer)
        )
        server = serving.Serving([ServerTelemetryInterceptor()])
        host = config.listen.rpartition(":")[0]
        servicer = Servicer(
            bridge, Intake(tokenizer, info, config.default_max_tokens), tokenizer, info, lambda: f"{host}:{server.port}"
        )
        add_ModelServerServicer_to_server(servicer, server.server)
        await server.start(config.listen, [_SERVICE])
        await server.set_ready(True)
        log.info(
            "serving",
            address=f"{host}:{server.port}",
            model=info.model_name,
            context_length=info.context_length,
            num_pages=info.num_pages,
            kv_bytes=info.kv_bytes,
            num_rank_rows=info.num_rank_rows,
            adapter_bytes=info.adapter_bytes,
        )
        on_ready(server)

        async def stop_when_engine_dies() -> None:
            await bridge.died.wait()
            server.request_stop()

        async def drain() -> None:
            servicer.start_draining()
            await servicer.drained(config.drain_s)

        watchdog = asyncio.create_task(stop_when_engine_dies())
        meter = asyncio.create_task(_meter(bridge))
        # The drain has waited for the requests; what is left are watches, which end only by being ended.
        await server.run_until_stopped(drain, grace_s=1.0)
        watchdog.cancel()
        meter.cancel()
        if bridge.died.is_set():
            log.error("engine_died")
            return 1
        return 0
    finally:
        await bridge.stop()
        if store_channel is not None:
            await store_channel.close()


async def _meter(bridge: Bridge) -> None:
    """The engine's statistics as metrics, as often as it reports them."""
    instruments = EngineMetrics()
    seen: messages.Status | None = None
    while True:
        seen = await bridge.next_status(seen)
        values = dataclasses.asdict(seen)
        instruments.observe(values, values | {"resident_adapters": len(seen.resident)})


class _Progress:
    """Log lines while the weights load, one each quarter."""

    def __init__(self) -> None:
        self._told = 0

    def __call__(self, done: int, total: int) -> None:
        quarter = 4 * done // max(1, total)
        if quarter > self._told:
            self._told = quarter
            log.info("loading_model", tensors=done, of=total)
