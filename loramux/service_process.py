"""One service as a child process: its own process group, its log, its address, its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from protos import errors, health

_TAIL_LINES = 30
_SHIM = Path(__file__).with_name("die_with_parent.py")
# How long a wait for readiness goes on before it looks whether the process still lives.
_SLICE_S = 1.0
# How long the members of a killed group may take to disappear.
_REAP_S = 5.0


class LaunchError(Exception):
    """A service did not come up, or went down by itself; the message ends with the last lines of its log."""


class ServiceProcess:
    """A command that serves gRPC and says where in one JSON line {"event": "serving", "address": …}.

    The child leads a process group, so a Ctrl-C in the terminal does not reach it and its own children end with it.
    When the thread that called `start` ends, it is told to stop.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        *,
        log_path: Path | None = None,
        on_line: Callable[[str, str], None] | None = None,
        on_exit: Callable[[ServiceProcess], None] | None = None,
    ) -> None:
        """`environment` is the child's whole environment, `directory` where it runs. Its output goes line by line to
        the end of `log_path` and to `on_line(name, line)`. `on_exit` is called from another thread, once."""
        self.name = name
        self.expected_to_run = True
        self._command = command
        self._environment = dict(environment)
        self._directory = directory
        self._log_path = log_path
        self._on_line = on_line
        self._on_exit = on_exit
        self._address: str | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._changed = threading.Condition()
        self._exited = False
        self._collecting = threading.Lock()
        self._popen: subprocess.Popen[str] | None = None
        self._threads: list[threading.Thread] = []

    @property
    def pid(self) -> int:
        """Also the id of its process group. Raises LaunchError before `start`."""
        return self._started().pid

    @property
    def returncode(self) -> int | None:
        return self._popen.returncode if self._popen and self._exited else None

    def start(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SHIM), str(os.getpid()), *self._command],
            env=self._environment,
            cwd=self._directory,
            process_group=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._threads = [
            threading.Thread(target=work, name=f"{self.name}-{work.__name__}", daemon=True)
            for work in (self._read_output, self._await_exit)
        ]
        for thread in self._threads:
            thread.start()

    def wait_address(self, timeout_s: float) -> str:
        """ "host:port", as soon as it accepts calls. Raises LaunchError when it ends first or takes too long."""
        with self._changed:
            self._changed.wait_for(lambda: self._address is not None or self._exited, timeout_s)
            if self._address is None or self._exited:
                raise self._failure(timeout_s)
            return self._address

    def wait_serving(self, timeout_s: float) -> str:
        """Its address, as soon as its health is SERVING. Raises LaunchError when it ends first or takes too long."""
        deadline = time.monotonic() + timeout_s
        address = self.wait_address(timeout_s)
        while True:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or self._exited:
                raise self._failure(timeout_s)
            try:
                health.wait_serving(address, min(remaining_s, _SLICE_S))
                return address
            except errors.ServiceError as error:
                if error.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    # It answered and broke off: most likely it is ending.
                    self._wait_exit(min(remaining_s, _SLICE_S))

    def terminate(self) -> None:
        """Ask it to drain and end."""
        self.expected_to_run = False
        if self._popen is not None:
            self._signal(os.kill, signal.SIGTERM)

    def stop(self, grace_s: float) -> None:
        """End it: SIGTERM, and after `grace_s` SIGKILL for whatever is left of its group. Returns when all is gone."""
        self.terminate()
        self._wait_exit(grace_s)
        self.kill()

    def kill(self) -> None:
        """SIGKILL for the whole group, as a crash would be. Returns when it is gone."""
        self.expected_to_run = False
        if self._popen is None:
            return
        self._signal(os.killpg, signal.SIGKILL)
        for thread in self._threads:
            thread.join()

    def tail(self) -> str:
        """The last lines it wrote."""
        return "\n".join(self._tail)

    def ended(self) -> LaunchError:
        """The error to report when it went down by itself."""
        status = self._started().returncode
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return LaunchError(f"{self.name} {how}\n{self.tail()}")

    def _started(self) -> subprocess.Popen[str]:
        if self._popen is None:
            raise LaunchError(f"{self.name} was not started")
        return self._popen

    def _failure(self, timeout_s: float) -> LaunchError:
        if self._exited:
            return self.ended()
        return LaunchError(f"{self.name} was not ready after {timeout_s:.0f} s\n{self.tail()}")

    def _wait_exit(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._exited or self._popen is None, timeout_s)

    def _signal(self, send: Callable[[int, int], None], number: signal.Signals) -> None:
        """To the process or its group, unless it has been collected: from then on the id may be a stranger's."""
        with self._collecting:
            if self._started().returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    send(self.pid, number)

    def _await_exit(self) -> None:
        with contextlib.suppress(ChildProcessError):  # the kernel collects where SIGCHLD is ignored
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        # Its own children would otherwise live on, and hold its output open.
        self._signal(os.killpg, signal.SIGKILL)
        # The kernel takes its time over a process that held gigabytes.
        deadline = time.monotonic() + _REAP_S
        while living_members(self.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        # Only now: until it is collected, nobody else can get its id.
        with self._collecting:
            self._started().wait()
        self._threads[0].join()
        with self._changed:
            self._exited = True
            self._changed.notify_all()
        if self._on_exit is not None:
            self._on_exit(self)

    def _read_output(self) -> None:
        stdout = self._started().stdout
        assert stdout is not None
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(self._log_path.open("a")) if self._log_path else None
            for line in stack.enter_context(stdout):
                if log is not None:
                    log.write(line)
                    log.flush()
                line = line.rstrip("\n")
                self._tail.append(line)
                if self._address is None:
                    self._look_for_address(line)
                if self._on_line is not None:
                    self._on_line(self.name, line)

    def _look_for_address(self, line: str) -> None:
        logged = log_entry(line)
        if logged.get("event") == "serving":
            with self._changed:
                self._address = str(logged["address"])
                self._changed.notify_all()


def log_entry(line: str) -> dict[str, Any]:
    """What a service logged in `line`; empty for what is not one of its JSON lines."""
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def living_members(group: int) -> list[int]:
    """The processes of a group that have not ended; one that is only waiting to be collected has."""
    living = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # "pid (name) state parent group …", where the name may hold anything.
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state not in "ZX":
                living.append(int(stat.parent.name))
    return living
