"""A stack of real processes, taken apart and put together again."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import grpc
import pytest

from loramux import ServiceError
from loramux.config import StackConfig
from loramux.launcher import ADAPTER_STORE, GATEWAY, Stack
from loramux.service_process import LaunchError, ServiceProcess, living_members
from protos import health

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_a_killed_model_server_comes_back_at_its_address(stack: Stack) -> None:
    (name,) = stack.model_server_names
    before = stack.addresses[name]
    group = stack.processes[name].pid
    stack.kill(name)
    assert not living_members(group)
    with pytest.raises(ServiceError) as caught:
        health.wait_serving(before, 0.2)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    stack.restart(name)
    assert stack.model_servers == (before,)
    with stack.client() as client:
        assert "Paris" in client.generate(QUESTION, max_tokens=16).read()


def test_health_as_a_command(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    assert [health.main([address]) for address in (stack.gateway, stack.adapter_store, *stack.model_servers)] == [0] * 3
    assert health.main(["127.0.0.1:1", "0.1"]) == 1
    assert capsys.readouterr().err.startswith("127.0.0.1:1: DEADLINE_EXCEEDED")
    assert health.main([]) == 2


def test_a_stack_that_cannot_start_leaves_nothing(tmp_path: Path) -> None:
    stack = Stack(StackConfig(data_dir=tmp_path, settings={"LORAMUX_ADAPTER_STORE_MAX_ADAPTER_BYTES": "none"}))
    with pytest.raises(LaunchError, match="adapter-store ended with status"):
        stack.start()
    assert list(stack.processes) == [ADAPTER_STORE] and GATEWAY not in stack.addresses
    assert not living_members(stack.processes[ADAPTER_STORE].pid)


def test_one_that_cannot_be_ended_does_not_keep_the_others_running(tmp_path: Path) -> None:
    class Unkillable(ServiceProcess):
        def kill(self) -> None:
            raise OSError("not this one")

    command = [sys.executable, "-m", "tests.loramux.mini_service", "serve"]
    stack = Stack(StackConfig(data_dir=tmp_path))
    root = Path(__file__).parents[2]
    stack.processes[GATEWAY] = Unkillable(GATEWAY, command, {}, root)
    stack.processes[ADAPTER_STORE] = store = ServiceProcess(ADAPTER_STORE, command, dict(os.environ), root)
    store.start()
    store.wait_address(10)
    try:
        with pytest.raises(OSError, match="not this one"):
            stack.stop()
        assert not living_members(store.pid)
    finally:
        store.kill()
