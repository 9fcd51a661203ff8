import asyncio
import contextlib

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.app import Gateway
from gateway.config import GatewayConfig
from observability.interceptors import client_interceptors
from observability.telemetry import setup
from protos import gateway_pb2_grpc
from protos.serving import channel
from tests.gateway.peers import ScriptedServer, Store, until


class World:
    """A running gateway with its peers, and a client's stub."""

    def __init__(self, gateway, stub, store, servers):
        self.gateway = gateway
        self.stub = stub
        self.store = store
        self.servers = servers

    @property
    def server(self):
        return self.servers[0]

    def loads(self):
        return {load.address: load for load in self.gateway.replicas.loads}

    async def idle(self):
        """Nothing is left of any request."""
        await until(lambda: all(load.outstanding == 0 for load in self.gateway.replicas.loads))
        await until(lambda: all(server.running == 0 for server in self.servers))
        self.gateway.dispatcher.check_integrity()


@pytest.fixture
async def start_world(tmp_path):
    """Starts a gateway before scripted servers: `await start_world(scripts, **config)`."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*scripts, ready=True, **config):
            store = await Store(tmp_path).start()
            stack.callback(store.close)
            stack.push_async_callback(store.stop)
            servers = [await ScriptedServer(script).start() for script in scripts]
            for server in servers:
                stack.push_async_callback(server.kill)
            gateway = Gateway(
                GatewayConfig(
                    listen="127.0.0.1:0",
                    adapter_store=store.address,
                    replicas=tuple(server.address for server in servers),
                    **{"replica_wait_s": 0.5, "drain_grace_s": 0.5, **config},
                )
            )
            await gateway.start()
            running = asyncio.create_task(gateway.run())

            async def stop():
                gateway.serving.request_stop()
                await running

            stack.push_async_callback(stop)
            connection = await stack.enter_async_context(channel(gateway.address, client_interceptors()))
            world = World(gateway, gateway_pb2_grpc.GenerationStub(connection), store, servers)
            if ready:
                await until(lambda: gateway.store.loaded.is_set())
                await until(lambda: all(load.ready for load in gateway.replicas.loads))
            return world

        yield start


@pytest.fixture
def measured(monkeypatch):
    """The data points of a metric, by its name, of instruments made from here on: `measured("gen_ai...")`."""
    reader = InMemoryMetricReader()
    monkeypatch.setattr(metrics, "get_meter", MeterProvider([reader]).get_meter)

    def points(name):
        data = reader.get_metrics_data()
        every = [
            metric for resource in data.resource_metrics for scope in resource.scope_metrics for metric in scope.metrics
        ]
        return next(metric.data.data_points for metric in every if metric.name == name)

    return points


@pytest.fixture
def exporter():
    exporter = InMemorySpanExporter()
    telemetry = setup("test", span_exporter=exporter, log_level="WARNING")
    yield exporter
    telemetry.shutdown()
