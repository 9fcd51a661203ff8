"""`python -m bench.soak`: the whole stack under random use for minutes; its memory must stay flat and nothing may be left.

Streams of base and adapters, cancels, deadlines, choices, pushes and deletes of revisions, and loads that push one another
out of a small bank, seeded. Exits 1 when a request fails in a way its own actions do not explain, when the engine does not come
back to rest with all pages free, or when the resident memory of a process still grows after the first third.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import grpc
import psutil
from rich.console import Console

from bench.adapters import write
from bench.session import adapter_shapes
from bench.workloads import Adapter
from loramux import ServiceError
from loramux.aio import AsyncClient
from loramux.config import StackConfig
from loramux.launcher import Stack
from model_server.weights import open_model
from protos import model_server_pb2, serving
from protos.model_server_pb2_grpc import ModelServerStub

_SAMPLE_S = 5.0
_GROWTH_LIMIT = 0.05


class Soak:
    def __init__(self, stack: Stack, client: AsyncClient, adapters: list[Path], seed: int) -> None:
        self._stack = stack
        self._client = client
        self._adapters = adapters
        self._random = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.unexpected: list[str] = []
        self.memory: dict[str, list[float]] = {name: [] for name in stack.processes}

    async def run(self, duration_s: float, concurrency: int) -> None:
        end_s = time.monotonic() + duration_s
        users = [self._user(end_s) for _ in range(concurrency)]
        await asyncio.gather(self._admin(end_s), self._watch(end_s), *users)

    async def _user(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            kind = self._random.choice(("plain", "plain", "cancel", "deadline", "choices"))
            adapter = self._random.choice([None, *(path.name for path in self._adapters)])
            prompt = [self._random.randrange(3, 40_000) for _ in range(self._random.randrange(1, 80))]
            try:
                async with self._client.generate(
                    prompt,
                    adapter=adapter,
                    max_tokens=self._random.randrange(1, 40),
                    temperature=self._random.choice((0.0, 0.8)),
                    n=2 if kind == "choices" else None,
                    timeout_s=self._random.uniform(0.05, 1.0) if kind == "deadline" else 120.0,
                    priority=self._random.choice(("low", "normal", "high")),
                ) as stream:
                    async for _ in stream:
                        if kind == "cancel" and self._random.random() < 0.3:
                            break
                self.outcomes["finished" if stream.finished else "cancelled"] += 1
            except ServiceError as error:
                self.outcomes[error.code.name] += 1
                if not _explained(error.code, kind, adapter):
                    self.unexpected.append(f"{kind} {adapter}: {error}")

    async def _admin(self, end_s: float) -> None:
        """Adapters come and go under their users' hands; they come more often, so that most requests find theirs."""
        while time.monotonic() < end_s:
            path = self._random.choice(self._adapters)
            try:
                if self._random.random() < 0.25:
                    await self._client.adapters.rm(path.name)
                    self.outcomes["deleted"] += 1
                else:
                    await self._client.adapters.push(path, path.name)
                    self.outcomes["pushed"] += 1
            except ServiceError as error:
                if error.code is not grpc.StatusCode.NOT_FOUND:
                    self.unexpected.append(f"admin {path.name}: {error}")
            await asyncio.sleep(self._random.uniform(0.1, 1.0))

    async def _watch(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            for name, process in self._stack.processes.items():
                self.memory[name].append(_resident_mb(process.pid))
            await asyncio.sleep(_SAMPLE_S)

    def growth(self) -> dict[str, float]:
        """Per service: the last third's median resident memory over the middle third's, less one."""
        result = {}
        for name, samples in self.memory.items():
            third = max(1, len(samples) // 3)
            result[name] = (
                statistics.median(samples[-third:]) / statistics.median(samples[third : 2 * third] or samples) - 1
            )
        return result


def _explained(code: grpc.StatusCode, kind: str, adapter: str | None) -> bool:
    """Whether a request may fail so: its deadline is short, or its adapter may be deleted. Leaving its loop raises nothing."""
    if code is grpc.StatusCode.NOT_FOUND:
        return adapter is not None
    return code is grpc.StatusCode.DEADLINE_EXCEEDED and kind == "deadline"


def _resident_mb(pid: int) -> float:
    process = psutil.Process(pid)
    resident: int = sum(p.memory_info().rss for p in (process, *process.children(recursive=True)))
    return resident / 1e6


async def _at_rest(address: str) -> model_server_pb2.ReplicaStatus:
    """The replica's status once it is idle; as it is after ten seconds."""
    channel = serving.channel(address)
    status = model_server_pb2.ReplicaStatus()
    try:
        async with asyncio.timeout(10):
            async for status in ModelServerStub(channel).WatchStatus(model_server_pb2.WatchStatusRequest()):
                if not status.running + status.waiting + status.parked:
                    break
    except TimeoutError:
        pass
    finally:
        await channel.close()
    return status


async def _soak(arguments: argparse.Namespace, console: Console) -> int:
    with tempfile.TemporaryDirectory() as directory:
        wanted = [Adapter(f"adapter-{index}", rank) for index, rank in enumerate((1, 3, 8, 8, 16, 32, 64))]
        shapes = adapter_shapes(open_model("smollm2").config)
        adapters = list(write(wanted, shapes, Path(directory) / "adapters").values())
        settings = {
            "LORAMUX_MODEL_SERVER_CHECK_EVERY_STEP": "true",
            "LORAMUX_MODEL_SERVER_KV_BYTES": str(60 * 737_280),
            "LORAMUX_MODEL_SERVER_ADAPTER_BYTES": str(80 * 1_221_120),
        }
        with Stack(StackConfig(data_dir=Path(directory) / "data", settings=settings)) as stack:
            async with AsyncClient(stack.gateway, adapter_store=stack.adapter_store) as client:
                for path in adapters:
                    await client.adapters.push(path, path.name)
                soak = Soak(stack, client, adapters, arguments.seed)
                await soak.run(arguments.minutes * 60, arguments.concurrency)
            status = await _at_rest(stack.model_servers[0])
    growth = soak.growth()
    console.print("outcomes", dict(soak.outcomes))
    for name, samples in soak.memory.items():
        console.print(f"{name}: {samples[0]:.0f} MB at first, {samples[-1]:.0f} MB at last, growth {growth[name]:+.1%}")
    console.print(f"at rest: {status.free_pages} of {status.num_pages} pages free, {status.step} steps")
    problems = soak.unexpected[:20]
    problems += [f"{name} grew by {share:.1%}" for name, share in growth.items() if share > _GROWTH_LIMIT]
    if status.running or status.waiting or status.parked or status.free_pages != status.num_pages:
        problems.append(f"not at rest: {status}")
    for problem in problems:
        console.print(f"[red]{problem}")
    return 1 if problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    return asyncio.run(_soak(parser.parse_args(), Console()))


if __name__ == "__main__":
    sys.exit(main())
