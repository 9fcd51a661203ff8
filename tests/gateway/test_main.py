"""The gateway as a process, configured as it is in production: by its environment."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import grpc
import pytest
from pydantic import ValidationError

from gateway.config import GatewayConfig
from protos import gateway_pb2, gateway_pb2_grpc
from protos.health import wait_serving
from tests.gateway.peers import ScriptedServer, Store, ask


def test_settings_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("LORAMUX_GATEWAY_REPLICAS", "a:1, b:2,")
    monkeypatch.setenv("LORAMUX_GATEWAY_API_KEYS", '{"k": "team"}')
    monkeypatch.setenv("LORAMUX_LOG_LEVEL", "DEBUG")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317")
    config = GatewayConfig()
    assert config.replicas == ("a:1", "b:2") and config.api_keys == {"k": "team"}
    assert (config.log_level, config.otlp_endpoint) == ("DEBUG", "http://collector:4317")


@pytest.mark.parametrize("name, value", [("QUEUE_LIMIT", "0"), ("API_KEYS", "k=team"), ("REPLICAS", "localhost")])
def test_a_bad_setting_stops_the_start_and_is_named(monkeypatch, name, value):
    monkeypatch.setenv(f"LORAMUX_GATEWAY_{name}", value)
    with pytest.raises((ValidationError, ValueError), match=name.lower()):
        GatewayConfig()


async def test_the_process_serves_gets_ready_and_stops_cleanly(tmp_path):
    store = await Store(tmp_path).start()
    server = await ScriptedServer().start()
    await store.put("alpha")
    environment = {
        **os.environ,
        "LORAMUX_GATEWAY_LISTEN": "127.0.0.1:0",
        "LORAMUX_GATEWAY_ADAPTER_STORE": store.address,
        "LORAMUX_GATEWAY_REPLICAS": server.address,
    }
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-m", "gateway"], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        lines = []
        while not lines or lines[-1]["event"] != "serving":
            lines.append(json.loads(await asyncio.to_thread(process.stderr.readline)))
        address = lines[-1]["address"]
        await asyncio.to_thread(wait_serving, address, 10.0)
        async with grpc.aio.insecure_channel(address) as channel:
            stub = gateway_pb2_grpc.GenerationStub(channel)
            answer = await stub.GenerateUnary(ask("alpha"), metadata=(("x-request-id", "r-9"),), timeout=10)
            assert answer.choices[0].text == "xxxx" and answer.accepted.request_id == "r-9"
            models = await stub.ListModels(gateway_pb2.ListModelsRequest())
            assert [adapter.adapter_id for adapter in models.adapters] == ["alpha"]
        process.send_signal(signal.SIGTERM)
        rest = await asyncio.to_thread(process.stderr.read)
        assert await asyncio.to_thread(process.wait, 10) == 0
        assert all(json.loads(line)["service"] == "gateway" for line in rest.splitlines()), rest
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        await server.kill()
        await store.stop()
        store.close()
