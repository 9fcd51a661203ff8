"""Our engine without services: the engine process behind its bridge. No gRPC, no text."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from bench.engines.engine import Setup
from bench.engines.server_settings import server_settings
from bench.measure import Outcome
from bench.workloads import Request
from model_server import messages
from model_server.bridge import Bridge
from model_server.config import ENGINE_ENVIRONMENT, Config
from model_server.request import AdapterRef, Finish, Sampling
from protos import adapter_format, errors


class LoramuxEngine:
    """See `Engine`."""

    def __init__(self, setup: Setup) -> None:
        self._config = Config.model_validate(server_settings(setup))
        # The engine takes digests for what they are; a made-up one names an adapter as well.
        self._refs = {
            name: AdapterRef(name, adapter_format.revision_digest([(name, str(path))]))
            for name, path in setup.adapters.items()
        }
        self._paths = {self._refs[name]: str(path) for name, path in setup.adapters.items()}
        self.facts: Mapping[str, str] = {"dtype": setup.dtype}

    def __enter__(self) -> Self:
        self._loop = asyncio.Runner()
        with _environment(ENGINE_ENVIRONMENT):
            self._loop.run(self._start())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.run(self._bridge.stop())
        self._loop.close()

    def play(self, requests: Sequence[Request]) -> list[Outcome]:
        return self._loop.run(self._play(requests))

    async def _start(self) -> None:
        self._bridge = Bridge(self._config, self._adapter_wanted, lambda ref, readable: None)
        await self._bridge.start(lambda done, total: None)

    def _adapter_wanted(self, ref: AdapterRef, download: bool) -> None:
        self._bridge.adapter_fetched(ref, self._paths[ref])

    async def _play(self, requests: Sequence[Request]) -> list[Outcome]:
        started_s = time.monotonic()
        return await asyncio.gather(*(self._ask(index, each, started_s) for index, each in enumerate(requests)))

    async def _ask(self, index: int, request: Request, started_s: float) -> Outcome:
        await asyncio.sleep(max(0.0, started_s + request.arrival_s - time.monotonic()))
        times_s: list[float] = []
        load_s = 0.0
        stream = self._bridge.open(1, lambda ended: None)
        try:
            self._bridge.submit(
                stream,
                request_id=f"bench-{index}",
                prompt_ids=list(request.prompt_ids),
                sampling=Sampling(max_tokens=request.output_tokens, ignore_eos=True),
                adapter=None if request.adapter is None else self._refs[request.adapter],
                priority=1,
                tenant=request.tenant,
                arrived_s=time.monotonic(),
                deadline_s=None,
            )
            async for event in stream:
                match event:
                    case messages.Tokens(sampled=sampled):
                        times_s += [time.monotonic() - started_s] * len(sampled)
                    case messages.Ended(finish=Finish.LENGTH):
                        load_s = event.adapter_load_s
                    case messages.Ended():
                        raise RuntimeError(f"{event.finish.value}: {event.failure.message if event.failure else ''}")
        except errors.ServiceError as error:
            raise RuntimeError(str(error)) from error
        finally:
            self._bridge.close(stream)
        return Outcome(tuple(times_s), load_s)


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """What the engine's process is born with: as under a model server. Not for long: peers are born from here too."""
    before = dict(os.environ)
    os.environ.update({**wanted, **before})
    try:
        yield
    finally:
        for name in wanted.keys() - before.keys():
            del os.environ[name]
