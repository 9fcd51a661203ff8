"""Several engines, or one engine on several workloads, measured in turns: drift of the machine then meets all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from bench import measure, workloads
from bench.goals import Case, Goal
from bench.session import Options, Session

_OUT = "output_tokens_per_s"


def run(
    cases: Sequence[Case],
    options: Options,
    *,
    repeats: int,
    seed: int,
    say: Callable[[str], None],
    field: str = _OUT,
) -> list[dict[str, Any]]:
    """One row per case, each field the median over `repeats`; of output tokens/s and of `field` also what each repeat gave, as
    `<field>_all`. All engines are up at the same time, one works at a time.

    Raises ValueError for a case that cannot be, RuntimeError where an engine fails.
    """
    measured: list[list[dict[str, Any]]] = [[] for _ in cases]
    with ExitStack() as stack:
        sessions = []
        for case in cases:
            say(f"starting {case.engine} for {case.workload}")
            workload = workloads.build(case.workload, seed=seed, repeats=repeats, **case.sizes)
            merged = options.with_settings(case.settings)
            sessions.append(stack.enter_context(Session(case.engine, workload, merged)))
        for index in range(repeats):
            turn = list(zip(cases, sessions, measured, strict=True))
            # Back and forth: none always comes after the same other.
            for case, session, rows in turn if index % 2 == 0 else reversed(turn):
                say(f"{case.engine}, {case.workload}: {index + 1} of {repeats}")
                rows.append(session.repeat(index))
    return [
        {
            **measure.median(rows),
            "repeat": repeats,
            **{f"{name}_all": [row[name] for row in rows] for name in (_OUT, field)},
        }
        for rows in measured
    ]


def check(
    goal: Goal, options: Options, *, repeats: int, seed: int, say: Callable[[str], None]
) -> tuple[float, list[dict[str, Any]]]:
    """The goal's ratio, and the rows it comes from."""
    cases = [goal.ours] if goal.against is None else [goal.ours, goal.against]
    rows = run(cases, options, repeats=repeats, seed=seed, say=say, field=goal.field)
    return goal.ratio(rows[0], rows[1] if len(rows) > 1 else None), rows
