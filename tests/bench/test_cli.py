"""The commands, on the real engine and the real stack, tiny."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.goals import GOALS
from bench.session import ENGINES
from bench.workloads import WORKLOADS, build

KEYS = {
    "workload", "engine", "adapters", "requests", "output_tokens_per_s", "total_tokens_per_s", "ttft_ms_p50",
    "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "adapter_hit_rate", "device", "dtype", "repeat",
}  # fmt: skip
TINY = ["--requests", "4", "--prompt-tokens", "8", "--output-tokens", "8", "--rank", "4", "--dtype", "float32"]


def invoke(*arguments: str, status: int = 0) -> str:
    # Wide enough that no message is broken where a path of any length ends.
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, arguments)
    assert result.exit_code == status, result.output + repr(result.exception)
    return result.output


def error_of(*arguments: str) -> str:
    """What a refused command says, out of its frame and on one line."""
    return " ".join(invoke(*arguments, status=2).replace("│", " ").split())


@pytest.fixture(scope="module")
def row() -> dict[str, Any]:
    """The result of a run of the engine alone."""
    output = invoke("run", *TINY, "--adapters", "2", "--repeat", "2", "--set", "num_threads=1", "--json")
    [line] = output.splitlines()
    parsed: dict[str, Any] = json.loads(line)
    return parsed


def test_a_run_gives_one_object_with_all_figures(row: dict[str, Any]) -> None:
    assert row.keys() >= KEYS
    assert (row["workload"], row["engine"], row["adapters"], row["requests"]) == ("flat", "loramux", 2, 4)
    assert row["repeat"] == len(row["output_tokens_per_s_all"]) == 2
    assert row["total_tokens_per_s"] == pytest.approx(2 * row["output_tokens_per_s"])
    assert row["adapter_hit_rate"] == 1.0, "the warm-up has loaded them"
    assert 0 < row["ttft_ms_p50"] <= row["ttft_ms_p99"] and 0 < row["itl_ms_p50"] <= row["itl_ms_p99"]


def test_results_become_pictures(row: dict[str, Any], tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text("\n".join(json.dumps({**row, "adapters": count}) for count in (1, 8)))
    for suffix, magic in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        output = invoke("plot", str(results), "-o", str(tmp_path / suffix), "--format", suffix)
        paths = [Path(line) for line in output.split()]
        assert [path.stem for path in paths] == ["ttft", "itl", "throughput"]
        assert all(path.read_bytes().startswith(magic) for path in paths)
    results.write_text("{}")
    assert "results.jsonl:1: not a result row" in error_of("plot", str(results))


def test_engine_alone_and_whole_stack_take_turns() -> None:
    """A storm of cold adapters through both, ratios against the quiet round in each row."""
    storm = ["--workload", "cold-storm", "--requests", "2", "--adapters", "2", "--prompt-tokens", "8"]
    sizes = ["--output-tokens", "24", "--rank", "4", "--dtype", "float32", "--repeat", "1", "--set", "num_threads=1"]
    output = invoke("compare", "--engines", "loramux,loramux-grpc", *storm, *sizes, "--json")
    rows = [json.loads(line) for line in output.splitlines()]
    assert [row["engine"] for row in rows] == ["loramux", "loramux-grpc"]
    for row in rows:
        assert row["adapter_hit_rate"] == 0.0, "every adapter of the storm was cold"
        assert row["others_itl_ratio_to_quiet"] > 0 and row["others_itl_ms_p99_warm"] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--workload", "flat", "--rate", "2"], "rate: has no meaning for workload flat"),
        (["run", "--workload", "nothing"], "workload: 'nothing'"),
        (["run", "--engine", "nothing"], "engine: 'nothing'"),
        (["run", "--engine", "peft", "--mode", "grpc"], "peft has no gRPC mode"),
        (["run", "--set", "num_threads"], "is not NAME=VALUE"),
        (["run", "--set", "no_such=1"], "no_such"),
        (["run", "--engine", "openvino", "--adapters", "2"], "applies one adapter"),
        (["goals", "nothing"], "no goal's name holds"),
    ],
)
def test_mistakes_are_named(arguments: list[str], says: str) -> None:
    assert says in error_of(*arguments)


def test_every_goal_can_be_measured() -> None:
    for goal in GOALS:
        for case in (goal.ours, goal.against):
            if case is not None:
                assert case.engine in ENGINES and case.workload in WORKLOADS
                build(case.workload, **case.sizes)
        assert (goal.dream < goal.must) == goal.at_most


def test_a_start_is_timed() -> None:
    row = json.loads(invoke("ready", "--repeat", "1", "--dtype", "float32", "--set", "num_threads=1", "--json"))
    assert 0 < row["seconds_until_ready"] == row["seconds_until_ready_all"][0]


def test_a_start_that_fails_says_why() -> None:
    assert "no-such-model" in error_of("ready", "--model", "no-such-model")
