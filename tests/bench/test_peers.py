"""The script that plays rounds on a peer, with a peer that answers by the clock, as its own process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import peer_setup
from bench.engines.engine import Setup
from bench.engines.line_process import LineProcess
from bench.engines.peer import PeerEngine

_SLOW = """
import sys, time
class Backend:
    def __init__(self, setup):
        print("noise on stdout")
        assert not {"bench", "model_server", "kernels"} & set(sys.modules)
        self.facts, self.running = {"dtype": setup["dtype"]}, {}
    def add(self, index, request):
        self.running[index] = request["output_tokens"]
    def step(self, emit):
        time.sleep(0.01)
        for index in list(self.running):
            emit(index, 1)
            self.running[index] -= 1
            if not self.running[index]:
                del self.running[index]
"""


@pytest.fixture
def runner(tmp_path: Path) -> list[str | Path]:
    """The command that runs a copy of the runner beside a peer of ours."""
    copy = tmp_path / "runner.py"
    copy.write_text((peer_setup.SCRIPTS / "runner.py").read_text())
    (tmp_path / "slow.py").write_text(_SLOW)
    return [sys.executable, "-P", copy, "slow.py"]


def test_requests_are_sent_when_they_are_due(runner: list[str | Path], tmp_path: Path) -> None:
    process = LineProcess(runner, {}, tmp_path / "slow.log")
    try:
        assert process.ask({"dtype": "float32"}) == {"dtype": "float32"}
        requests = [{"arrival_s": at_s, "output_tokens": count} for at_s, count in ((0.3, 2), (0.0, 3), (0.01, 1))]
        for _ in range(2):
            times = [outcome["token_times_s"] for outcome in process.ask(requests)]
            assert [len(of_one) for of_one in times] == [2, 3, 1]
            assert times[0][0] >= 0.31 and times[1][0] >= 0.01 and times[1] == sorted(times[1])
    finally:
        process.stop()
    assert "noise on stdout" in (tmp_path / "slow.log").read_text()


def test_a_peer_that_fails_says_why(runner: list[str | Path], tmp_path: Path) -> None:
    process = LineProcess(runner, {}, tmp_path / "slow.log")
    try:
        with pytest.raises(RuntimeError, match="KeyError: 'dtype'"):
            process.ask({})
    finally:
        process.stop()


def test_what_a_peer_cannot_do_is_refused() -> None:
    setup = Setup("smollm2", "bfloat16", {"a": Path("a")}, 8, None, 128, ("bench",))
    with pytest.raises(ValueError, match="adapters: openvino applies one adapter"):
        PeerEngine("openvino", setup)
