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
from model_server.engine_stream import EngineStream, Event
from model_server.request import AdapterRef, Finish, Sampling
from protos import adapter_format


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
        recorder = _Recorder(len(requests))
        for index in sorted(range(len(requests)), key=lambda index: requests[index].arrival_s):
            request = requests[index]
            await asyncio.sleep(max(0.0, request.arrival_s - recorder.now_s()))
            key = self._bridge.submit(
                recorder,
                request_id=f"bench-{index}",
                prompt_ids=list(request.prompt_ids),
                sampling=Sampling(max_tokens=request.output_tokens, ignore_eos=True),
                adapter=None if request.adapter is None else self._refs[request.adapter],
                priority=1,
                tenant=request.tenant,
                arrived_s=time.monotonic(),
                deadline_s=None,
            )
            recorder.index_of[key] = index
        await recorder.complete
        return [
            Outcome(tuple(times), load_s)
            for times, load_s in zip(recorder.token_times_s, recorder.loads_s, strict=True)
        ]


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


class _Recorder(EngineStream):
    """All requests of a round: events are noted as the bridge hands them over, so that measuring costs little."""

    def __init__(self, num_requests: int) -> None:
        super().__init__(cancel=lambda key: None, on_end=lambda ended: None)
        self._start_s = time.monotonic()
        self._num_missing = num_requests
        self.index_of: dict[int, int] = {}
        self.token_times_s: list[list[float]] = [[] for _ in range(num_requests)]
        self.loads_s = [0.0] * num_requests
        self.complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def now_s(self) -> float:
        return time.monotonic() - self._start_s

    def put(self, event: Event | None) -> None:
        match event:
            case messages.Tokens(key=key, sampled=sampled):
                self.token_times_s[self.index_of[key]] += [self.now_s()] * len(sampled)
            case messages.Ended(key=key):
                self.loads_s[self.index_of[key]] = event.adapter_load_s
                self._num_missing -= 1
                if event.finish is not Finish.LENGTH:
                    self._fail(f"{event.finish.value}: {event.failure.message if event.failure else ''}")
                elif not self._num_missing:
                    self.complete.set_result(None)
            case None:
                self._fail("the engine process died")

    def _fail(self, why: str) -> None:
        if not self.complete.done():
            self.complete.set_exception(RuntimeError(why))
