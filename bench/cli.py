"""The command line of `python -m bench`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench import comparison, peer_setup, startup, workloads
from bench.goals import GOALS, Case
from bench.session import ENGINES, LORAMUX, LORAMUX_GRPC, Options
from loramux.service_process import LaunchError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
_out, _err = Console(), Console(stderr=True)

_COLUMNS = (
    "workload", "engine", "adapters", "requests", "output_tokens_per_s", "total_tokens_per_s", "requests_per_s",
    "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "adapter_hit_rate", "device", "dtype", "repeat",
)  # fmt: skip
# Series and distributions: in the JSON, too long for a table.
_HIDDEN = {"ttft_ms", "itl_ms", "service", "output_tokens_per_s_all", "version"}


class Mode(StrEnum):
    engine = "engine"
    grpc = "grpc"


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"
    float16 = "float16"


class Format(StrEnum):
    png = "png"
    svg = "svg"


_Workload = Annotated[str, typer.Option(help=f"One of: {', '.join(workloads.WORKLOADS)}.")]
_Size = Annotated[int | None, typer.Option(help="Default: the workload's own, as for all sizes.")]
_Real = Annotated[float | None, typer.Option(help="Of workloads that have arrivals over time.")]
_Repeat = Annotated[int, typer.Option(min=1, help="Times the workload is measured; rows are medians.")]
_Seed = Annotated[int, typer.Option(min=0)]
_Json = Annotated[bool, typer.Option("--json", help="One JSON object a line instead of a table.")]
_Model = Annotated[str, typer.Option(help='"smollm2" or a Hugging Face directory.')]
_Device = Annotated[str, typer.Option(help="cpu, or cuda for our own engine.")]
_WeightDtype = Annotated[str | None, typer.Option(help="Of our engine's weights, where other than --dtype: int8.")]
_MaxRunning = Annotated[int, typer.Option(min=1, help="Requests in one batch.")]
_Set = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of our model server.")]


@app.command()
def run(
    workload: _Workload = "flat",
    engine: Annotated[str, typer.Option(help=f"One of: {', '.join(ENGINES)}.")] = LORAMUX,
    mode: Annotated[
        Mode, typer.Option(help="Of engine loramux: alone, or the whole stack through the gateway.")
    ] = Mode.engine,
    requests: _Size = None,
    prompt_tokens: _Size = None,
    output_tokens: _Size = None,
    adapters: _Size = None,
    rank: _Size = None,
    rate: _Real = None,
    duration_s: _Real = None,
    cv: _Real = None,
    alpha: _Real = None,
    resident: _Size = None,
    min_tokens: _Size = None,
    max_tokens: _Size = None,
    max_total_tokens: _Size = None,
    repeat: _Repeat = 1,
    seed: _Seed = 0,
    model: _Model = peer_setup.SMOLLM2,
    dtype: Dtype = Dtype.bfloat16,
    weight_dtype: _WeightDtype = None,
    device: _Device = "cpu",
    max_running: _MaxRunning = 64,
    set_: _Set = None,
    as_json: _Json = False,
) -> None:
    """Measure one engine on one workload."""
    sizes = _sizes(locals())
    if mode is Mode.grpc:
        if engine != LORAMUX:
            raise typer.BadParameter(f"{engine} has no gRPC mode", param_hint="--mode")
        engine = LORAMUX_GRPC
    options = Options(model, dtype.value, device, max_running, _settings(weight_dtype, set_))
    with _reported() as say:
        rows = comparison.run([Case(engine, workload, sizes)], options, repeats=repeat, seed=seed, say=say)
    _print(rows, as_json)


@app.command()
def compare(
    engines: Annotated[str, typer.Option(help="Names, separated by commas; ratios are the first one's to each other.")],
    workload: _Workload = "flat",
    requests: _Size = None,
    prompt_tokens: _Size = None,
    output_tokens: _Size = None,
    adapters: _Size = None,
    rank: _Size = None,
    rate: _Real = None,
    duration_s: _Real = None,
    cv: _Real = None,
    alpha: _Real = None,
    resident: _Size = None,
    min_tokens: _Size = None,
    max_tokens: _Size = None,
    max_total_tokens: _Size = None,
    repeat: _Repeat = 3,
    seed: _Seed = 0,
    model: _Model = peer_setup.SMOLLM2,
    dtype: Dtype = Dtype.bfloat16,
    weight_dtype: _WeightDtype = None,
    device: _Device = "cpu",
    max_running: _MaxRunning = 64,
    set_: _Set = None,
    as_json: _Json = False,
) -> None:
    """Measure several engines on one workload, taking turns."""
    sizes = _sizes(locals())
    names = [name.strip() for name in engines.split(",") if name.strip()]
    if not names:
        raise typer.BadParameter("names no engine", param_hint="--engines")
    options, settings = Options(model, dtype.value, device, max_running), _settings(weight_dtype, set_)
    # Settings are our model server's; its peers are compared with it as it is set.
    cases = [Case(name, workload, sizes, settings if name in (LORAMUX, LORAMUX_GRPC) else {}) for name in names]
    with _reported() as say:
        rows = comparison.run(cases, options, repeats=repeat, seed=seed, say=say)
    _print(rows, as_json)
    if not as_json:
        for row in rows[1:]:
            ratio = rows[0]["output_tokens_per_s"] / row["output_tokens_per_s"]
            _out.print(f"{rows[0]['engine']} / {row['engine']}: [bold]{ratio:.2f}×[/] output tokens/s")


@app.command()
def goals(
    only: Annotated[str, typer.Argument(help="Only goals whose name holds this.")] = "",
    repeat: _Repeat = 3,
    seed: _Seed = 0,
    model: _Model = peer_setup.SMOLLM2,
    dtype: Dtype = Dtype.bfloat16,
    as_json: _Json = False,
) -> None:
    """Measure the ratios the engine is held to; exit status 1 where one is missed."""
    chosen = [goal for goal in GOALS if only in goal.name]
    if not chosen:
        raise typer.BadParameter(
            f"no goal's name holds {only!r}: {', '.join(goal.name for goal in GOALS)}", param_hint="only"
        )
    table = Table("goal", "ratio", "must", "dream", "ours", "against")
    missed = False
    for goal in chosen:
        try:
            with _reported() as say:
                ratio, rows = comparison.check(goal, Options(model, dtype.value), repeats=repeat, seed=seed, say=say)
        except typer.Exit:  # said already; the others are measured all the same
            missed = True
            table.add_row(goal.name, "[red]failed", f"{goal.must:g}", f"{goal.dream:g}", "", "")
            continue
        missed |= not goal.reached(ratio)
        values = [f"{row[goal.field]:.2f}" for row in rows]
        colour = "green" if goal.reached(ratio) else "red"
        table.add_row(goal.name, f"[{colour}]{ratio:.2f}", f"{goal.must:g}", f"{goal.dream:g}", *values)
        if as_json:
            print(
                json.dumps({"goal": goal.name, "ratio": ratio, "must": goal.must, "dream": goal.dream, "rows": rows}),
                flush=True,
            )
    if not as_json:
        _out.print(table)
    if missed:
        raise typer.Exit(1)


@app.command()
def ready(
    repeat: _Repeat = 3,
    model: _Model = peer_setup.SMOLLM2,
    dtype: Dtype = Dtype.bfloat16,
    device: _Device = "cpu",
    set_: _Set = None,
    as_json: _Json = False,
) -> None:
    """Measure how long our model server takes to start; exit status 1 where that is too long."""
    options = Options(model, dtype.value, device, settings=_settings(None, set_))
    with _reported() as say:
        times_s = startup.seconds_until_ready(options, repeats=repeat, say=say)
    median_s = statistics.median(times_s)
    if as_json:
        row = {"seconds_until_ready": median_s, "seconds_until_ready_all": times_s, "dtype": dtype.value}
        print(json.dumps({**row, "must": startup.MUST_S, "dream": startup.DREAM_S}))
    else:
        _out.print(
            f"ready after {median_s:.1f} s (must {startup.MUST_S:g}, dream {startup.DREAM_S:g}); "
            f"each: {', '.join(f'{value:.1f}' for value in times_s)}"
        )
    if median_s > startup.MUST_S:
        raise typer.Exit(1)


@app.command()
def plot(
    results: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="What --json printed.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the pictures.")] = Path(
        "build/bench/plots"
    ),
    format_: Annotated[Format, typer.Option("--format")] = Format.png,
) -> None:
    """Draw distributions and throughput from results; needs the extra `bench`."""
    # Only here: measuring needs no matplotlib.
    from bench import plot as pictures

    try:
        rows = pictures.read(results)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="results") from error
    for path in pictures.draw(rows, output, format_.value):
        print(path)


@app.command("setup-peers")
def setup_peers(names: Annotated[list[str] | None, typer.Argument(help="Default: all.")] = None) -> None:
    """Create the peers' environments under build/peers."""
    for name in names or list(peer_setup.PEERS):
        if name not in peer_setup.PEERS:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(peer_setup.PEERS)}", param_hint="names")
        _err.print(f"setting up {name}")
        peer_setup.set_up(name)


def _sizes(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of a command's arguments that are sizes of a workload, and given."""
    known = {size for name in workloads.WORKLOADS for size in workloads.sizes_of(name)}
    return {name: value for name, value in arguments.items() if name in known and value is not None}


def _settings(weight_dtype: str | None, assignments: Sequence[str] | None) -> dict[str, str]:
    settings = {} if weight_dtype is None else {"weight_dtype": weight_dtype}
    for assignment in assignments or ():
        name, equals, value = assignment.partition("=")
        if not equals:
            raise typer.BadParameter(f"{assignment!r} is not NAME=VALUE", param_hint="--set")
        settings[name] = value
    return settings


@contextmanager
def _reported() -> Iterator[Callable[[str], None]]:
    """What is going on, on stderr where that is a terminal; failures in one line."""
    try:
        with _err.status("") as status:
            yield status.update
    except (ValueError, RuntimeError, OSError, LaunchError) as error:
        _err.print(f"[red]error:[/] {error}", markup=True, highlight=False)
        raise typer.Exit(2) from error


def _print(rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    # One line per figure: rows are few, figures many and their names long.
    fields = [*_COLUMNS, *(name for name in rows[0] if name not in _COLUMNS and name not in _HIDDEN)]
    table = Table(show_header=False, box=None)
    for name in fields:
        table.add_row(name, *(_shown(row.get(name)) for row in rows))
    _out.print(table)


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main() -> None:
    app(prog_name="python -m bench")
