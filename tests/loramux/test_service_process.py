from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loramux.service_process import LaunchError, ServiceProcess, living_members

ROOT = Path(__file__).parents[2]
MINI = [sys.executable, "-m", "tests.loramux.mini_service"]
Make = Callable[[str], ServiceProcess]


@pytest.fixture
def exits() -> queue.SimpleQueue[ServiceProcess]:
    return queue.SimpleQueue()


@pytest.fixture
def make(tmp_path: Path, exits: queue.SimpleQueue[ServiceProcess]) -> Iterator[Make]:
    made: list[ServiceProcess] = []

    def start(manner: str) -> ServiceProcess:
        log = tmp_path / "mini.log"
        process = ServiceProcess("mini", [*MINI, manner], dict(os.environ), ROOT, log_path=log, on_exit=exits.put)
        made.append(process)
        process.start()
        return process

    yield start
    for process in made:
        process.kill()


def gone(pid: int) -> bool:
    """Whether the process has ended (a zombie that its parent has yet to collect has)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def serving_entry(process: ServiceProcess) -> dict[str, object]:
    return next(json.loads(line) for line in process.tail().splitlines() if line.startswith("{"))


def test_serves_then_stops_with_all_it_started(make: Make, tmp_path: Path) -> None:
    process = make("serve")
    assert process.wait_serving(10) == serving_entry(process)["address"]
    assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
    process.stop(5)
    assert process.returncode == 0
    assert not living_members(process.pid)
    assert "not JSON" in (tmp_path / "mini.log").read_text()


def test_one_that_ignores_sigterm_is_killed(make: Make) -> None:
    process = make("stubborn")
    process.wait_serving(10)
    started = time.monotonic()
    process.stop(0.3)
    assert process.returncode == -signal.SIGKILL
    assert time.monotonic() - started < 3
    assert not living_members(process.pid)


def test_one_that_never_serves_is_reported_with_its_words(make: Make) -> None:
    process = make("broken")
    with pytest.raises(LaunchError, match=r"ended with status 2\n.*no model at /nowhere"):
        process.wait_serving(10)


def test_one_that_dies_while_it_gets_ready_is_reported(make: Make) -> None:
    process = make("crash")
    with pytest.raises(LaunchError, match="ended with status 3"):
        process.wait_serving(10)


def test_one_that_takes_too_long_is_reported(make: Make) -> None:
    with pytest.raises(LaunchError, match="not ready after 0 s"):
        make("serve").wait_serving(0.001)


def test_a_crash_is_told_and_takes_the_children_along(make: Make, exits: queue.SimpleQueue[ServiceProcess]) -> None:
    process = make("serve")
    process.wait_serving(10)
    os.kill(process.pid, signal.SIGKILL)
    ended = exits.get(timeout=5)
    assert ended is process and process.expected_to_run
    assert str(process.ended()).startswith("mini was killed by SIGKILL")
    assert wait_until(lambda: not living_members(process.pid))


def test_kill_is_not_taken_for_a_crash(make: Make, exits: queue.SimpleQueue[ServiceProcess]) -> None:
    process = make("serve")
    process.wait_serving(10)
    process.kill()
    assert not exits.get(timeout=5).expected_to_run
    assert process.returncode == -signal.SIGKILL


def test_a_stranger_with_the_id_of_one_that_ended_is_left_alone(
    make: Make, exits: queue.SimpleQueue[ServiceProcess]
) -> None:
    process = make("broken")
    exits.get(timeout=10)
    stranger = subprocess.Popen(["sleep", "1000"], process_group=0)
    try:
        # As when the kernel has given the id away again.
        process._started().pid = stranger.pid
        process.terminate()
        process.stop(0)
        process.kill()
        with pytest.raises(subprocess.TimeoutExpired):
            stranger.wait(0.2)
    finally:
        stranger.kill()
        stranger.wait()


def test_children_end_when_the_launcher_is_killed(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    assert not gone(pid)
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    assert wait_until(lambda: gone(pid))


LAUNCHER = f"""
import os, pathlib, time
from loramux.service_process import ServiceProcess
process = ServiceProcess("mini", {MINI!r} + ["serve"], os.environ, pathlib.Path({str(ROOT)!r}))
process.start()
process.wait_serving(10)
print(process.pid, flush=True)
time.sleep(100)
"""
