"""The whole stack as processes, asked through the gateway by one more process (grpc_client.py)."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.engines.engine import Setup
from bench.engines.line_process import LineProcess
from bench.engines.server_settings import server_settings
from bench.measure import Outcome
from bench.workloads import Request
from loramux.aio import AsyncClient
from loramux.config import StackConfig
from loramux.launcher import Stack

_ROOT = Path(__file__).resolve().parents[2]
_PARALLEL_UPLOADS = 8


class LoramuxGrpc:
    """See `Engine`. Every tenant has an API key of its own."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._keys = {tenant: f"key-of-{tenant}" for tenant in setup.tenants}
        self.facts: Mapping[str, str] = {"dtype": setup.dtype}

    def __enter__(self) -> Self:
        settings = {
            f"LORAMUX_MODEL_SERVER_{name.upper()}": value for name, value in server_settings(self._setup).items()
        }
        settings["LORAMUX_GATEWAY_API_KEYS"] = json.dumps({key: tenant for tenant, key in self._keys.items()})
        # The gateway is not to hold back what the engine could batch.
        settings["LORAMUX_GATEWAY_QUEUE_LIMIT"] = settings["LORAMUX_MODEL_SERVER_MAX_REQUESTS"]
        with ExitStack() as starting:
            folder = Path(starting.enter_context(tempfile.TemporaryDirectory(prefix="loramux-bench-")))
            config = StackConfig(data_dir=folder, model=self._setup.model, settings=settings)
            self._stack = starting.enter_context(Stack(config))
            asyncio.run(self._publish())
            self._client = LineProcess(
                [sys.executable, "-m", "bench.engines.grpc_client"],
                {"PYTHONPATH": str(_ROOT)},
                folder / "logs" / "client.log",
            )
            starting.callback(self._client.stop)
            self._client.ask({"gateway": self._stack.gateway, "keys": self._keys})
            self._running = starting.pop_all()
        return self

    def play(self, requests: Sequence[Request]) -> list[Outcome]:
        answer = self._client.ask([asdict(request) for request in requests])
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return [Outcome(tuple(outcome["token_times_s"]), outcome["adapter_load_s"]) for outcome in answer["outcomes"]]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._running.close()

    async def _publish(self) -> None:
        """Push every adapter; returns when the gateway knows them all."""
        limit = asyncio.Semaphore(_PARALLEL_UPLOADS)
        key = next(iter(self._keys.values()))
        async with AsyncClient(self._stack.gateway, adapter_store=self._stack.adapter_store, api_key=key) as client:

            async def push(name: str, path: Path) -> None:
                async with limit:
                    await client.adapters.push(path, name)

            await asyncio.gather(*(push(name, path) for name, path in self._setup.adapters.items()))
            # What other processes do sets no event here.
            while len((await client.models()).adapters) < len(self._setup.adapters):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
