"""Several engines, or one engine on several workloads, measured in turns: drift of the machine then meets all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from bench import measure, workloads
from bench.goals import Case, Goal
from bench.session import Options, Session


def run(
    cases: Sequence[Case], options: Options, *, repeats: int, seed: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One row per case, each field the median over `repeats`. All engines are up at the same time, one works at a time.

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
            for case, session, rows in zip(cases, sessions, measured, strict=True):
                say(f"{case.engine}, {case.workload}: {index + 1} of {repeats}")
                rows.append(session.repeat(index))
    return [
        {
            **measure.median(rows),
            "repeat": repeats,
            "output_tokens_per_s_all": [row["output_tokens_per_s"] for row in rows],
        }
        for rows in measured
    ]


def check(
    goal: Goal, options: Options, *, repeats: int, seed: int, say: Callable[[str], None]
) -> tuple[float, list[dict[str, Any]]]:
    """The goal's ratio, and the rows it comes from."""
    cases = [goal.ours] if goal.against is None else [goal.ours, goal.against]
    rows = run(cases, options, repeats=repeats, seed=seed, say=say)
    return goal.ratio(rows[0], rows[1] if len(rows) > 1 else None), rows
