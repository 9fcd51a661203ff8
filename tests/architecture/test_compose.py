"""compose.yaml without a container engine: its commands, environments and health checks, run as local processes."""

from __future__ import annotations

import inspect
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import GatewayConfig
from loramux import Client
from loramux.service_process import ServiceProcess
from model_server.config import Config
from protos.serving import Serving

ROOT = Path(__file__).parents[2]
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
READY_WITHIN_S = 300


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Host:
    """One machine in place of the containers' network: each service's port becomes a free one of ours, its files a
    folder of ours."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = {name: free_port() for name in SERVICES}

    def translate(self, service: str, value: str) -> str:
        """`value` of `service` as it must read on this machine."""
        own = f"127.0.0.1:{self._ports[service]}"
        value = re.sub(r"\b(?:0\.0\.0\.0|localhost):\d+", own, value)
        for name, port in self._ports.items():
            value = re.sub(rf"(?<![\w-]){re.escape(name)}:\d+", f"127.0.0.1:{port}", value)
        return re.sub(r"^/data\b", str(self._folder / service), value)

    def command(self, service: str, command: list[str]) -> list[str]:
        assert command[0] == "python"
        return [sys.executable, *(self.translate(service, word) for word in command[1:])]

    def environment(self, service: str) -> dict[str, str]:
        """What compose.yaml gives it and nothing else, but for what any process needs to find its files."""
        values = SERVICES[service]["environment"]
        translated = {key: self.translate(service, str(value)) for key, value in values.items()}
        return {"PATH": os.environ["PATH"], "HOME": str(self._folder), "PYTHONPATH": str(ROOT), **translated}

    def address(self, service: str) -> str:
        return f"127.0.0.1:{self._ports[service]}"


def in_order() -> list[str]:
    """Services, each after those it depends on."""
    ordered: list[str] = []

    def add(name: str) -> None:
        for needed in SERVICES[name].get("depends_on", {}):
            add(needed)
        if name not in ordered:
            ordered.append(name)

    for name in SERVICES:
        add(name)
    return ordered


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("compose")
    host = Host(folder)
    started: list[ServiceProcess] = []
    try:
        for service in in_order():
            command = host.command(service, SERVICES[service]["command"])
            log = folder / f"{service}.log"
            process = ServiceProcess(service, command, host.environment(service), folder, log_path=log)
            process.start()
            started.append(process)
        for process in started:
            process.wait_serving(READY_WITHIN_S)
        yield host
    finally:
        for process in reversed(started):
            process.stop(5)


@pytest.mark.parametrize("service", SERVICES)
def test_health_check_passes(host: Host, service: str) -> None:
    kind, *command = SERVICES[service]["healthcheck"]["test"]
    assert kind == "CMD"
    result = subprocess.run(
        host.command(service, command), env=host.environment(service), capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_base_and_adapter_answer(host: Host, demo_adapters: dict[str, Path]) -> None:
    adapter_id, directory = next(iter(demo_adapters.items()))
    with Client(host.address("gateway"), adapter_store=host.address("adapter-store")) as client:
        revision = client.adapters.push(directory, adapter_id).revision.ref.revision
        message = [{"role": "user", "content": "What is the capital of France?"}]
        assert "Paris" in client.generate(message, max_tokens=16).read()
        stream = client.generate(message, adapter=adapter_id, revision=revision, max_tokens=8)
        assert stream.read()
        assert stream.accepted is not None and stream.accepted.adapter.revision == revision
        known = client.models()
    assert [replica.ready for replica in known.replicas] == [True, True]


@pytest.mark.parametrize("service", SERVICES)
def test_image_runs_what_compose_runs(service: str) -> None:
    target = SERVICES[service]["build"]["target"]
    stages = (ROOT / "Dockerfile").read_text().split("\nFROM ")
    stage = next(text for text in stages if text.split("\n")[0].endswith(f"AS {target}"))
    command = re.search(r"^CMD (.*)$", stage, re.MULTILINE)
    assert command is not None and yaml.safe_load(command[1]) == SERVICES[service]["command"]


@pytest.mark.parametrize("service", SERVICES)
def test_service_comes_back_when_it_fails_and_has_time_to_drain(service: str) -> None:
    assert SERVICES[service]["restart"] == "on-failure"  # a drain exits with 0, a dead engine does not
    drains_s = {
        "gateway": GatewayConfig.model_fields["drain_grace_s"].default,
        "model-server": Config.model_fields["drain_s"].default,
        "adapter-store": 0,
    }
    # After its own drain each server gives what is left this much.
    grace_s = inspect.signature(Serving.run_until_stopped).parameters["grace_s"].default
    period = re.fullmatch(r"(\d+)s", SERVICES[service]["stop_grace_period"])
    assert period is not None and int(period[1]) > drains_s[SERVICES[service]["build"]["target"]] + grace_s


@pytest.mark.parametrize("extra", ["gateway", "adapter-store"])
def test_light_images_get_no_torch(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"][extra]]
    assert not [line for line in wanted if re.match(r"torch|triton|transformers|peft|loramux\[", line)]
    assert f"'.[{extra}]'" in (ROOT / "Dockerfile").read_text()
