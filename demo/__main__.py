"""`make demo`: start the whole stack, publish the adapters beside this file, stream from all of them at once, and check
what they say. Exit status 0 only if every answer is as it should be and no process is left."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.status import Status
from rich.text import Text

from demo.prompts import ADAPTER_PROMPTS, BASE_PROMPTS, HeldOut, shows
from loramux import AsyncClient, ServiceError
from loramux.aio import AsyncStream
from loramux.config import StackConfig
from loramux.launcher import Stack
from loramux.service_process import LaunchError, living_members
from loramux.terminal import short

ADAPTERS = Path(__file__).parent / "adapters"
MAX_TOKENS = 48


@dataclass
class Answer:
    """One stream of the demonstration and what is known of it so far. Times in seconds on one clock."""

    adapter: str | None  # None: the base model
    asked: HeldOut
    # What a base answer must not look like: the behaviours of the adapters that get the same prompt.
    foreign: tuple[str, ...] = ()
    stream: AsyncStream | None = None
    error: str | None = None
    started: float = 0.0
    first: float | None = None
    last: float | None = None
    faults: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.stream.text if self.stream else ""

    @property
    def heading(self) -> str:
        accepted = self.stream.accepted if self.stream else None
        if self.adapter is None:
            return "base model"
        return f"{self.adapter}@{short(accepted.adapter.revision)}" if accepted else self.adapter

    @property
    def figures(self) -> str:
        if self.first is None or self.last is None or self.stream is None:
            return self.error or "…"
        parts = [f"first token {1000 * (self.first - self.started):.0f} ms"]
        if self.last > self.first:
            rate = (len(self.stream.token_ids) - 1) / (self.last - self.first)
            parts.append(f"{rate:.0f} tokens/s")
        return ", ".join(parts)

    def check(self) -> None:
        """Fill in `faults`."""
        if self.error is not None:
            self.faults.append(self.error)
            return
        if self.asked.contains.lower() not in self.text.lower():
            self.faults.append(f"does not say {self.asked.contains!r}")
        if self.adapter is not None and not shows(self.adapter, self.text):
            self.faults.append("does not show what the adapter was trained for")
        self.faults += [f"the base answers like {name}" for name in self.foreign if shows(name, self.text)]

    def panel(self) -> Panel:
        body = Group(Text(self.asked.prompt, style="dim"), Text(self.text))
        return Panel(body, title=self.heading, subtitle=self.figures, width=46, height=13)

    def block(self) -> str:
        verdict = "ok" if not self.faults else "WRONG: " + "; ".join(self.faults)
        return f"--- {self.heading} ({self.figures}) {verdict}\n> {self.asked.prompt}\n{self.text}\n"


def planned(adapters: Iterable[str]) -> list[Answer]:
    """Each adapter on its own prompt, and the base model on every one of those."""
    asked = {name: ADAPTER_PROMPTS[name][0] for name in adapters}
    base = {BASE_PROMPTS[0].prompt: BASE_PROMPTS[0]}
    for held_out in asked.values():
        base.setdefault(held_out.prompt, HeldOut(held_out.prompt))
    alike = {prompt: tuple(name for name, mine in asked.items() if mine.prompt == prompt) for prompt in base}
    return [
        *(Answer(None, held_out, foreign=alike[prompt]) for prompt, held_out in base.items()),
        *(Answer(name, held_out) for name, held_out in asked.items()),
    ]


async def stream_all(gateway: str, answers: list[Answer], console: Console) -> None:
    """All streams at once; drawn side by side as they grow where there is a terminal to draw on."""

    def drawn() -> Columns:
        return Columns([answer.panel() for answer in answers])

    async with AsyncClient(gateway) as client:
        with Live(console=console, get_renderable=drawn) if console.is_terminal else contextlib.nullcontext():
            await asyncio.gather(*(follow(client, answer) for answer in answers))


async def follow(client: AsyncClient, answer: Answer) -> None:
    answer.started = time.monotonic()
    message = {"role": "user", "content": answer.asked.prompt}
    answer.stream = client.generate([message], adapter=answer.adapter, max_tokens=MAX_TOKENS)
    try:
        async for _ in answer.stream:
            answer.last = time.monotonic()
            answer.first = answer.first or answer.last
    except ServiceError as error:
        answer.error = str(error)


def publish(stack: Stack, directories: Iterable[Path], console: Console) -> None:
    with stack.client() as client:
        for directory in directories:
            revision = client.adapters.push(directory, directory.name).revision
            size_kb = sum(file.size for file in revision.files) / 1000
            what = f"rank {revision.max_rank}, {size_kb:.0f} kB"
            console.print(f"published {directory.name}@{short(revision.ref.revision)} ({what})", markup=False)


def show_state(console: Console, status: Status, name: str, state: str) -> None:
    status.update(f"{name}: {state}")
    if state == "ready":
        console.print(f"{name} ready")


def main() -> int:
    console = Console(highlight=False)
    directories = sorted(path.parent for path in ADAPTERS.glob("*/adapter_config.json"))
    answers = planned(directory.name for directory in directories)
    with tempfile.TemporaryDirectory(prefix="loramux-demo-") as data_dir:
        stack = Stack(
            StackConfig(data_dir=Path(data_dir)),
            on_state=lambda name, state: show_state(console, status, name, state),
        )
        status = console.status("starting adapter store, model server and gateway")
        try:
            with status:
                stack.start()
            publish(stack, directories, console)
            asyncio.run(stream_all(stack.gateway, answers, console))
        except (LaunchError, ServiceError) as error:
            console.print(f"error: {error}", style="red", markup=False)
            return 1
        finally:
            stack.stop()
    for answer in answers:
        answer.check()
        if not console.is_terminal:
            console.print(answer.block(), markup=False, soft_wrap=True)
    faults = [f"{answer.heading}: {fault}" for answer in answers for fault in answer.faults]
    faults += [f"{name} left a process" for name, process in stack.processes.items() if living_members(process.pid)]
    for fault in faults:
        console.print(f"error: {fault}", style="red", markup=False, soft_wrap=True)
    if not faults:
        console.print(f"{len(answers)} streams at once from one model, every answer as it should be", style="green")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
