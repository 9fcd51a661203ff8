"""asyncio on one side, the engine process on the other: starts it, sends it messages, hands each request its own events."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from model_server import messages
from model_server.config import Config
from model_server.engine_stream import EngineStream
from model_server.request import AdapterRef, Sampling
from model_server.runner import RunnerInfo
from protos import errors


def _run_engine(config: Config, pipe: Connection) -> None:
    # Imported in the child: torch has no place in the serving process.
    from model_server import engine_process

    engine_process.main(config, pipe)


class Bridge:
    """Owner of the engine process. All methods belong to the event loop's thread."""

    def __init__(
        self,
        config: Config,
        on_adapter_wanted: Callable[[AdapterRef, bool], None],
        on_adapter_done: Callable[[AdapterRef, bool], None],
    ) -> None:
        self._config = config
        self._on_adapter_wanted = on_adapter_wanted
        self._on_adapter_done = on_adapter_done
        self._keys = itertools.count(1)
        self._streams: dict[int, EngineStream] = {}
        self._promised: Counter[EngineStream] = Counter()  # requests it has room for and has yet to submit
        self._pins: dict[int, asyncio.Future[messages.Failure | None]] = {}
        self._pipe, self._child_pipe = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_run_engine, args=(config, self._child_pipe), name="engine", daemon=True
        )
        self._ready: asyncio.Future[RunnerInfo] = asyncio.get_running_loop().create_future()
        self.died = asyncio.Event()
        # Set while no request is in the engine, nor promised a place there.
        self.idle = asyncio.Event()
        self.idle.set()
        self.status = messages.Status(0, 0, 0, 0, 0, (), 0)
        self._status_changed = asyncio.Condition()
        self._notifications: set[asyncio.Task[None]] = set()
        self._progress: Callable[[int, int], None] = lambda done, total: None

    async def start(self, progress: Callable[[int, int], None]) -> RunnerInfo:
        """Start the process and wait until the model is loaded. `progress(done, total)` counts weight tensors.

        Raises RuntimeError when the process ends before it is ready; its own message is on stderr.
        """
        self._progress = progress
        self._process.start()
        self._child_pipe.close()
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._readable)
        return await self._ready

    def open(self, num_requests: int, on_end: Callable[[messages.Ended], None]) -> EngineStream:
        """A stream to submit `num_requests` to, whenever that is: their places are kept until `close`, which belongs in
        a `finally`. `on_end` is called with the engine's last word on each of them.

        Raises UNAVAILABLE when the engine has died, RESOURCE_EXHAUSTED when there is no room for so many.
        """
        self._check_alive()
        num_taken = len(self._streams) + self._promised.total()
        if num_taken + num_requests > self._config.max_requests:
            raise errors.resource_exhausted(
                "max_requests",
                f"this model server holds {num_taken} of at most {self._config.max_requests} requests",
                retry_after_s=1.0,
            )
        soon = asyncio.get_running_loop().call_soon
        stream = EngineStream(lambda key: self._send(messages.Cancel(key)), lambda ended: soon(on_end, ended))
        self._promised[stream] = num_requests
        self.idle.clear()
        return stream

    def submit(
        self,
        stream: EngineStream,
        *,
        request_id: str,
        prompt_ids: list[int],
        sampling: Sampling,
        adapter: AdapterRef | None,
        priority: int,
        tenant: str,
        arrived_s: float,
        deadline_s: float | None,
    ) -> int:
        """Hand a validated request to the engine; its events go to `stream`, under the key returned.

        Raises UNAVAILABLE when the engine has died.
        """
        self._check_alive()
        assert self._promised[stream] > 0, "more requests than the stream was opened for"
        self._promised[stream] -= 1
        key = next(self._keys)
        stream.add(key)
        self._streams[key] = stream
        self._send(
            messages.Submit(key, request_id, prompt_ids, sampling, adapter, priority, tenant, arrived_s, deadline_s)
        )
        return key

    def close(self, stream: EngineStream) -> None:
        """Nobody reads it any more: the engine drops within a step what it still works on, and places not taken are free."""
        del self._promised[stream]
        stream.cancel()
        self._note_idle()

    async def pin(self, ref: AdapterRef) -> messages.Failure | None:
        """Until the adapter is resident, to stay so until it is unpinned; or why it is not. Who is cancelled here only
        stops waiting.

        Raises UNAVAILABLE when the engine has died or dies meanwhile.
        """
        self._check_alive()
        key = next(self._keys)
        ended: asyncio.Future[messages.Failure | None] = asyncio.get_running_loop().create_future()
        self._pins[key] = ended
        try:
            self._send(messages.Pin(key, ref))
            return await ended
        finally:
            self._pins.pop(key, None)

    def unpin(self, ref: AdapterRef) -> None:
        """Raises UNAVAILABLE when the engine has died."""
        self._check_alive()
        self._send(messages.Unpin(ref))

    def adapter_fetched(self, ref: AdapterRef, path: str) -> None:
        self._send(messages.AdapterFetched(ref, path))

    def adapter_missing(self, ref: AdapterRef) -> None:
        self._send(messages.AdapterMissing(ref))

    def adapter_failed(self, ref: AdapterRef, failure: messages.Failure) -> None:
        self._send(messages.AdapterFetchFailed(ref, failure))

    async def next_status(self, seen: messages.Status | None) -> messages.Status:
        """The engine's status once it is another than `seen`."""
        async with self._status_changed:
            await self._status_changed.wait_for(lambda: self.status is not seen)
            return self.status

    async def stop(self) -> None:
        """End the process; open streams end with UNAVAILABLE."""
        self._send(messages.Stop())
        await asyncio.to_thread(self._process.join, 10)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        self._closed()

    def _check_alive(self) -> None:
        if self.died.is_set():
            raise errors.unavailable("the engine process died")

    def _send(self, message: Any) -> None:
        try:
            self._pipe.send(message)
        except OSError:
            self._closed()

    def _readable(self) -> None:
        try:
            events = self._pipe.recv()
        except (EOFError, OSError):
            self._closed()
            return
        for event in events:
            self._dispatch(event)

    def _dispatch(self, event: Any) -> None:
        # Callbacks get a turn of their own: what they raise is logged there and costs nobody an event.
        soon = asyncio.get_running_loop().call_soon
        match event:
            case messages.Tokens() | messages.Started() | messages.PromptScored():
                self._streams[event.key].put(event)
            case messages.Ended():
                self._streams.pop(event.key).put(event)
                self._note_idle()
            case messages.PinEnded(key, failure):
                if key in self._pins and not self._pins[key].done():  # else nobody waits any more
                    self._pins[key].set_result(failure)
            case messages.Status():
                self.status = event
                self._notify()
            case messages.AdapterWanted(ref, download):
                soon(self._on_adapter_wanted, ref, download)
            case messages.AdapterDone(ref, readable):
                soon(self._on_adapter_done, ref, readable)
            case messages.Loading(done, total):
                soon(self._progress, done, total)
            case messages.Ready(info):
                self._ready.set_result(info)

    def _note_idle(self) -> None:
        if not self._streams and not self._promised.total():
            self.idle.set()

    def _notify(self) -> None:
        async def notify() -> None:
            async with self._status_changed:
                self._status_changed.notify_all()

        task = asyncio.get_running_loop().create_task(notify())
        self._notifications.add(task)
        task.add_done_callback(self._notifications.discard)

    def _closed(self) -> None:
        if self.died.is_set():
            return
        self.died.set()
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._pipe.close()
        if not self._ready.done():
            self._ready.set_exception(RuntimeError("the engine process ended while loading the model"))
        for pin in self._pins.values():
            if not pin.done():
                pin.set_exception(errors.unavailable("the engine process died"))
        streams, self._streams = self._streams, {}
        for stream in set(streams.values()):
            stream.put(None)
        self.idle.set()
