"""`loramux up` as people run it: a process with real services below it, asked to stop, or failing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loramux.service_process import living_members

LORAMUX = Path(sys.executable).with_name("loramux")
PORTS = ["--gateway-port", "0", "--model-server-port", "0", "--adapter-store-port", "0"]


@pytest.fixture
def terminal_less(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def up(started: list[subprocess.Popen[str]], data_dir: Path, *options: str) -> subprocess.Popen[str]:
    command = [str(LORAMUX), "up", "--data-dir", str(data_dir), *PORTS, *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    started.append(process)
    return process


def children(pid: int) -> list[int]:
    """Process ids of the direct children, each of which leads a group of its own."""
    return [int(child) for child in Path(f"/proc/{pid}/task").glob("*/children") for child in child.read_text().split()]


def test_serves_until_ctrl_c_and_leaves_nothing(terminal_less: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    process = up(terminal_less, tmp_path)
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if line.startswith("ready at"):
            break
    ready = re.search(r"^ready at (\S+),", said, re.MULTILINE)
    assert ready is not None, said
    assert re.findall(r"^(\S+) ready at", said, re.MULTILINE) == ["adapter-store", "model-server-0", "gateway"]

    question = [LORAMUX, "generate", "What is the capital of France?", "--gateway", ready[1], "--max-tokens", "16"]
    answer = subprocess.run(question, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0 and "Paris" in answer.stdout, answer.stderr

    groups = children(process.pid)
    assert len(groups) == 3
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert process.stderr.read() == "stopped\n"
    assert not [member for group in groups for member in living_members(group)]


def test_a_service_that_cannot_start_ends_it_all(terminal_less: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    process = up(terminal_less, tmp_path, "--model", "/nowhere")
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert re.search(r"^error: model-server-0 ended with status [1-9]", said, re.MULTILINE), said
    assert "/nowhere" in said


def test_a_service_that_dies_ends_it_all(terminal_less: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    process = up(terminal_less, tmp_path)
    deadline = time.monotonic() + 60
    while not (store := children(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    # The store is the first; the others wait for its address.
    os.kill(store[0], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: adapter-store was killed by SIGKILL" in said
    assert not living_members(store[0])
