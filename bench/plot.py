"""Result rows as pictures: distributions of TTFT and of inter-token gaps, and throughput against the number of adapters."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot

_SIZE_INCHES = (7.0, 4.2)


def read(path: Path) -> list[dict[str, Any]]:
    """Rows as `--json` printed them, one a line. Raises ValueError naming the line that is none."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            row["workload"], row["ttft_ms"], row["itl_ms"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a result row: {error}") from error
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: holds no result rows")
    return rows


def draw(rows: Sequence[dict[str, Any]], folder: Path, suffix: str) -> list[Path]:
    """Write the pictures into `folder`, as `suffix` ("png" or "svg"); their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    device = ", ".join(sorted({row["device"] for row in rows}))
    pictures = [
        _distribution(rows, "ttft_ms", "time to first token, ms", folder / f"ttft.{suffix}", device),
        _distribution(rows, "itl_ms", "inter-token gap, ms", folder / f"itl.{suffix}", device),
    ]
    if len({row["adapters"] for row in rows}) > 1:
        pictures.append(_throughput(rows, folder / f"throughput.{suffix}", device))
    return pictures


def _label(row: dict[str, Any]) -> str:
    return f"{row['engine']}, {row['workload']}, {row['requests']:g} requests, {row['adapters']:g} adapters"


def _distribution(rows: Iterable[dict[str, Any]], field: str, title: str, path: Path, device: str) -> Path:
    figure, axes = pyplot.subplots(figsize=_SIZE_INCHES, layout="constrained")
    for row in rows:
        axes.plot(row[field], range(len(row[field])), label=_label(row))
    # Tokens that came in one message have gaps of 0, which no logarithm shows.
    axes.set_xscale("log", nonpositive="clip")
    axes.set(xlabel=title, ylabel="% of all at most", title=device, ylim=(0, 100))
    return _save(figure, axes, path)


def _throughput(rows: Iterable[dict[str, Any]], path: Path, device: str) -> Path:
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        lines[f"{row['engine']}, {row['workload']}"].append((row["adapters"], row["output_tokens_per_s"]))
    figure, axes = pyplot.subplots(figsize=_SIZE_INCHES, layout="constrained")
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    counts = sorted({count for points in lines.values() for count, _ in points})
    axes.set_xscale("symlog", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set(xlabel="adapters", ylabel="output tokens/s", title=device)
    axes.set_ylim(bottom=0)
    return _save(figure, axes, path)


def _save(figure: Any, axes: Any, path: Path) -> Path:
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
