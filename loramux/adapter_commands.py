"""`loramux adapters …`: what the store holds, and changing it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from loramux import config
from loramux.client import Client
from loramux.terminal import err, out, reported, show_rows

app = typer.Typer(no_args_is_help=True, help="Publish, list, alias and remove adapters.")

Store = Annotated[str, typer.Option(help="Address of the adapter store.", envvar="LORAMUX_CLIENT_ADAPTER_STORE")]
AdapterId = Annotated[str, typer.Argument(help="Name of the adapter.", metavar="ADAPTER")]
DEFAULT_STORE = f"localhost:{config.ADAPTER_STORE_PORT}"


@app.command(epilog="Example: loramux adapters push ./out/checkpoint-300 support-bot --alias prod")
def push(
    directory: Annotated[Path, typer.Argument(help="As PEFT's save_pretrained wrote it.")],
    adapter: AdapterId,
    alias: Annotated[str | None, typer.Option(help="Alias to point at it.")] = None,
    adapter_store: Store = DEFAULT_STORE,
) -> None:
    """Publish an adapter; prints its revision, which is the same for the same content."""
    columns = (TextColumn("uploading"), BarColumn(), DownloadColumn())
    with (
        reported(),
        Client(adapter_store=adapter_store) as client,
        Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar,
    ):
        task = bar.add_task("", total=None)
        answer = client.adapters.push(
            directory, adapter, alias, progress=lambda sent, total: bar.update(task, completed=sent, total=total)
        )
    out.print(answer.revision.ref.revision)
    if not answer.created:
        err.print("this content was there already", style="dim")


@app.command("list", epilog="Example: loramux adapters list support-bot")
def list_(
    adapter: Annotated[str | None, typer.Argument(help="Default: all.")] = None,
    adapter_store: Store = DEFAULT_STORE,
) -> None:
    """Show revisions, newest first, with their aliases."""
    with reported(), Client(adapter_store=adapter_store) as client:
        listing = client.adapters.list(adapter)
    rows = []
    for revision in listing.revisions:
        ref = revision.ref
        aliases = [a.alias for a in listing.aliases if (a.adapter_id, a.revision) == (ref.adapter_id, ref.revision)]
        rows.append(
            (
                ref.adapter_id,
                ref.revision,
                ", ".join(sorted(aliases)),
                str(revision.max_rank),
                f"{revision.num_parameters:,}",
                f"{sum(file.size for file in revision.files) / 1e6:.2f} MB",
                f"{revision.created.ToDatetime():%Y-%m-%d %H:%M}",
            )
        )
    show_rows(("adapter", "revision", "aliases", "rank", "parameters", "size", "created"), rows)


@app.command(epilog="Example: loramux adapters alias support-bot prod sha256:5f0c…")
def alias(
    adapter: AdapterId,
    name: Annotated[str, typer.Argument(help="The alias.", metavar="ALIAS")],
    revision: Annotated[str | None, typer.Argument(help="Where it shall point.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove it instead.")] = False,
    adapter_store: Store = DEFAULT_STORE,
) -> None:
    """Point an alias at a revision, or remove it; prints where it pointed before, for the way back."""
    if (revision is None) != remove:
        raise typer.BadParameter("give either a revision or --remove", param_hint="REVISION")
    with reported(), Client(adapter_store=adapter_store) as client:
        answer = client.adapters.alias(adapter, name, revision)
    out.print(answer.previous_revision or "new", soft_wrap=True)


@app.command(epilog="Example: loramux adapters rm support-bot sha256:5f0c…")
def rm(
    adapter: AdapterId,
    revision: Annotated[str | None, typer.Argument(help="One revision of it.")] = None,
    whole: Annotated[bool, typer.Option("--all", help="All its revisions.")] = False,
    adapter_store: Store = DEFAULT_STORE,
) -> None:
    """Delete one revision, or an adapter whole. What an alias points at is refused."""
    if (revision is None) != whole:
        raise typer.BadParameter("give either a revision or --all", param_hint="REVISION")
    with reported(), Client(adapter_store=adapter_store) as client:
        answer = client.adapters.rm(adapter, revision)
    out.print(f"deleted {answer.deleted_revisions}")
