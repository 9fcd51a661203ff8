"""The engine's end of a bridge's pipe, in the hands of a test: no process, no model."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

from model_server import messages
from model_server.bridge import Bridge
from model_server.config import Config
from model_server.request import AdapterRef, Finish
from model_server.runner import RunnerInfo

INFO = RunnerInfo("tiny", 1, 16, 0, 0, {}, 1, 1, context_length=64, vocab_size=16, eos_token_ids=())


class FakeEngine:
    """Stands in for the bridge's process. What the bridge sends piles up until `received`."""

    def __init__(
        self,
        max_requests: int = 8,
        on_adapter_done: Callable[[AdapterRef, bool], None] = lambda ref, readable: None,
    ) -> None:
        self.bridge = Bridge(Config(max_requests=max_requests), lambda *_: None, on_adapter_done)
        self.bridge._process = self
        self._pipe = Connection(os.dup(self.bridge._child_pipe.fileno()))

    def send(self, *events: Any) -> None:
        """In one message, as the engine sends what came of a step."""
        self._pipe.send(list(events))

    def received(self, kind: type[Any]) -> list[Any]:
        """The messages of that kind since the last call; others are dropped."""
        messages = []
        while self._pipe.poll():
            messages.append(self._pipe.recv())
        return [message for message in messages if isinstance(message, kind)]

    async def next(self, kind: type[Any]) -> Any:
        """The only message of that kind, once it is here; others are dropped."""
        messages: list[Any] = []
        while not messages:
            await asyncio.sleep(0.001)
            messages = self.received(kind)
        [message] = messages
        return message

    def die(self) -> None:
        self._pipe.close()

    # The process's side

    def start(self) -> None:
        self.send(messages.Ready(INFO))

    def join(self, timeout_s: float | None = None) -> None:
        self._pipe.close()

    def is_alive(self) -> bool:
        return False


@asynccontextmanager
async def started(**options: Any) -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(**options)
    await engine.bridge.start(lambda done, total: None)
    yield engine
    await engine.bridge.stop()


async def settle() -> None:
    """Until what was sent has been dispatched, and who waited for it has had a turn."""
    for _ in range(10):
        await asyncio.sleep(0)


def ended(key: int, finish: Finish = Finish.LENGTH, num_output: int = 0) -> messages.Ended:
    """Of a request that waited for no adapter; with no output, of one that was never scheduled."""
    nowhere: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(messages.Ended))
    never = messages.Ended(**nowhere | {"key": key, "finish": finish, "adapter_load_s": 0.0, "num_preemptions": 0})
    at_s = 1.0 if num_output else None
    return dataclasses.replace(
        never, num_output=num_output, num_cached=0, first_scheduled_s=at_s, first_token_s=at_s, last_token_s=at_s
    )
