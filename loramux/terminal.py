"""How the commands talk: results on stdout, everything about them on stderr; colours and bars only on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NoReturn

import typer
from rich.console import Console
from rich.table import Table

from loramux.client import Stream
from protos.errors import ServiceError

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def show_rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on a terminal; in a pipe whole values between tabs, without a heading."""
    if not out.is_terminal:
        for row in rows:
            typer.echo("\t".join(row))
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    out.print(table)


def short(revision: str) -> str:
    """A revision as people read it: the first 12 hex digits."""
    return revision.removeprefix("sha256:")[:12]


def summary(stream: Stream, started: float, first: float | None, ended: float) -> str:
    """Who answered, and how fast as seen from here. Times in seconds on one clock."""
    accepted, finished = stream.accepted, stream.finished
    assert accepted is not None and finished is not None
    who = accepted.base_model
    if accepted.adapter.adapter_id:
        who = f"{accepted.adapter.adapter_id}@{short(accepted.adapter.revision)}"
    tokens = finished.usage.output_tokens
    parts = [who, f"{finished.usage.prompt_tokens} + {tokens} tokens"]
    if first is not None:
        parts.append(f"first after {1000 * (first - started):.0f} ms")
        if tokens > 1 and ended > first:
            parts.append(f"{(tokens - 1) / (ended - first):.1f} tokens/s")
    return ", ".join(parts)


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """A failure of a service is one line and status 1; Ctrl-C is the shell's 130."""
    try:
        yield
    except ServiceError as error:
        fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def fail(error: Exception) -> NoReturn:
    err.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(1)
