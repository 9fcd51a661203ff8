"""The whole stack on one machine: adapter store, model servers and gateway as child processes.

with Stack(StackConfig(data_dir=Path("data"), replicas=2)) as stack:
    print(stack.client().generate("Hello").read())
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from loramux.client import Client
from loramux.config import StackConfig
from loramux.service_process import LaunchError, ServiceProcess, log_entry

ADAPTER_STORE = "adapter-store"
GATEWAY = "gateway"
# A stack on somebody's desk need not wait long for streams in flight. Their own settings, where given, come first.
_LOCAL_SETTINGS = {"LORAMUX_GATEWAY_DRAIN_GRACE_S": "4", "LORAMUX_MODEL_SERVER_DRAIN_S": "4"}
# Longer than these together, so that SIGKILL comes only for one that hangs.
STOP_GRACE_S = 15.0
_PACKAGES = Path(__file__).resolve().parents[1]


class Stack:
    """Started in order of need, stopped in reverse; leaves no process behind, also when this process dies."""

    def __init__(
        self,
        config: StackConfig,
        *,
        on_line: Callable[[str, str], None] | None = None,
        on_state: Callable[[str, str], None] | None = None,
    ) -> None:
        """`on_line(service, line)` gets all their output; `on_state(service, state)` gets "starting", how far a model
        has loaded, and "ready". Both are called from other threads too. Logs go to <data_dir>/logs/<service>.log."""
        self.config = config
        self.processes: dict[str, ServiceProcess] = {}
        self.addresses: dict[str, str] = {}
        self._on_line = on_line
        self._on_state = on_state or (lambda service, state: None)
        self._exits: queue.SimpleQueue[ServiceProcess] = queue.SimpleQueue()
        # Children live as long as the thread that starts them: one that lives as long as the stack.
        self._spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loramux-spawner")

    @property
    def gateway(self) -> str:
        """ "host:port" of the gateway."""
        return self.addresses[GATEWAY]

    @property
    def adapter_store(self) -> str:
        return self.addresses[ADAPTER_STORE]

    @property
    def model_server_names(self) -> tuple[str, ...]:
        return tuple(f"model-server-{index}" for index in range(self.config.replicas))

    @property
    def model_servers(self) -> tuple[str, ...]:
        """Addresses, in the order of `model_server_names`."""
        return tuple(self.addresses[name] for name in self.model_server_names)

    def client(self, api_key: str | None = None) -> Client:
        return Client(self.gateway, adapter_store=self.adapter_store, api_key=api_key)

    def start(self) -> None:
        """Return when every service is SERVING. Raises LaunchError, with nothing left running."""
        try:
            deadline = time.monotonic() + self.config.start_timeout_s
            (self.config.data_dir / "logs").mkdir(parents=True, exist_ok=True)
            # A service is told the others' addresses, so each tier must have its own before the next one starts.
            for tier in ((ADAPTER_STORE,), self.model_server_names, (GATEWAY,)):
                for name in tier:
                    self._spawn(name, self._first_port(name))
                for name in tier:
                    self.addresses[name] = self.processes[name].wait_address(deadline - time.monotonic())
            for name in (ADAPTER_STORE, *self.model_server_names, GATEWAY):
                self._wait_serving(name, deadline)
        except BaseException:
            self.stop(grace_s=1.0)
            raise

    def wait(self) -> LaunchError:
        """Block until a service ends by itself; what to say about it."""
        while True:
            process = self._exits.get()
            if process.expected_to_run:
                return process.ended()

    def kill(self, name: str) -> None:
        """End one service as a crash would."""
        self.processes[name].kill()

    def restart(self, name: str) -> None:
        """Start one service anew on its address; returns when it is SERVING. Raises LaunchError."""
        self.processes[name].stop(STOP_GRACE_S)
        self._spawn(name, int(self.addresses[name].rpartition(":")[2]))
        self._wait_serving(name, time.monotonic() + self.config.start_timeout_s)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End all, gateway first, so that what is in flight can finish; after `grace_s` in all, by SIGKILL."""
        deadline = time.monotonic() + grace_s
        with contextlib.ExitStack() as in_any_case:
            in_any_case.callback(self._spawner.shutdown)
            for process in self.processes.values():
                in_any_case.callback(process.kill)
            for tier in ((GATEWAY,), self.model_server_names, (ADAPTER_STORE,)):
                running = [self.processes[name] for name in tier if name in self.processes]
                for process in running:
                    process.terminate()
                for process in running:
                    process.stop(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _spawn(self, name: str, port: int) -> None:
        self._on_state(name, "starting")
        module, settings = self._service(name, f"{self.config.host}:{port}")
        process = ServiceProcess(
            name,
            [sys.executable, "-m", module],
            self._environment(settings),
            # Not where the caller is: a folder there with the name of one of our packages would be imported instead.
            self.config.data_dir,
            log_path=(self.config.data_dir / "logs" / f"{name}.log").absolute(),
            on_line=self._observe,
            on_exit=self._exits.put,
        )
        self.processes[name] = process
        self._spawner.submit(process.start).result()

    def _observe(self, name: str, line: str) -> None:
        logged = log_entry(line)
        if logged.get("event") == "loading_model":
            self._on_state(name, f"{logged.get('tensors')} of {logged.get('of')} tensors loaded")
        if self._on_line is not None:
            self._on_line(name, line)

    def _wait_serving(self, name: str, deadline: float) -> None:
        self.processes[name].wait_serving(deadline - time.monotonic())
        self._on_state(name, "ready")

    def _first_port(self, name: str) -> int:
        if name == GATEWAY:
            return self.config.gateway_port
        if name == ADAPTER_STORE:
            return self.config.adapter_store_port
        first = self.config.model_server_port
        return first and first + self.model_server_names.index(name)

    def _service(self, name: str, listen: str) -> tuple[str, dict[str, str]]:
        """The module to run and the settings it needs to be part of this stack."""
        data_dir = self.config.data_dir.absolute()
        if name == ADAPTER_STORE:
            return "adapter_store", {
                "LORAMUX_ADAPTER_STORE_LISTEN": listen,
                "LORAMUX_ADAPTER_STORE_DATA_DIR": str(data_dir / "adapter-store"),
            }
        if name == GATEWAY:
            return "gateway", {
                "LORAMUX_GATEWAY_LISTEN": listen,
                "LORAMUX_GATEWAY_ADAPTER_STORE": self.adapter_store,
                "LORAMUX_GATEWAY_REPLICAS": ",".join(self.model_servers),
            }
        model = self.config.model
        return "model_server", {
            "LORAMUX_MODEL_SERVER_LISTEN": listen,
            "LORAMUX_MODEL_SERVER_MODEL": str(Path(model).absolute()) if Path(model).exists() else model,
            "LORAMUX_MODEL_SERVER_ADAPTER_STORE": self.adapter_store,
            "LORAMUX_MODEL_SERVER_CACHE_DIR": str(data_dir / name / "cache"),
        }

    def _environment(self, settings: Mapping[str, str]) -> dict[str, str]:
        inherited = self.config.inherited
        path = os.pathsep.join(filter(None, (str(_PACKAGES), inherited.get("PYTHONPATH"))))
        forced = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **self.config.settings, **settings}
        return {**_LOCAL_SETTINGS, **inherited, **forced}
