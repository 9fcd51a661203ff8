"""What steps took, and what follows for prefill beside decodes."""

from __future__ import annotations

from random import Random

import pytest

from model_server.pace import LEAST_TOKENS, Pace


def learnt(decodes: int, base_s: float, row_s: float, *, max_slowdown: float = 1.5, noise: float = 0.0) -> Pace:
    """After 200 steps of a machine on which a step of `decodes` takes `base_s` and each further row `row_s`."""
    pace, random = Pace(max_slowdown), Random(0)
    for step in range(200):
        prefill = (0, 0, 40, 256)[step % 4]
        seconds = base_s + prefill * row_s
        pace.record(decodes, prefill, seconds * random.uniform(1 - noise, 1 + noise))
    return pace


@pytest.mark.parametrize(("base_s", "row_s", "tokens"), [(0.030, 0.0010, 15), (0.100, 0.0005, 100)])
def test_prefill_gets_the_share_of_a_step(base_s: float, row_s: float, tokens: int) -> None:
    assert learnt(8, base_s, row_s).prefill_tokens(8) == pytest.approx(tokens, abs=1)
    assert learnt(8, base_s, row_s, noise=0.2).prefill_tokens(8) == pytest.approx(tokens, rel=0.3)


def test_more_decodes_take_longer_alone() -> None:
    pace = learnt(8, 0.030, 0.001)
    assert pace.prefill_tokens(28) == pytest.approx(25, abs=1)  # half of 30 ms and 20 rows' worth


def test_a_prompt_goes_on_whatever_was_measured() -> None:
    assert Pace(1.5).prefill_tokens(8) == LEAST_TOKENS
    assert learnt(8, 0.030, 0.1).prefill_tokens(8) == LEAST_TOKENS
    assert learnt(8, 0.030, 0.001, max_slowdown=1.0).prefill_tokens(8) == LEAST_TOKENS


def test_where_rows_cost_nothing_there_is_no_limit_to_speak_of() -> None:
    assert learnt(8, 0.030, 1e-9).prefill_tokens(8) > 1_000_000


def test_it_follows_a_machine_that_changes() -> None:
    pace = learnt(8, 0.030, 0.001)
    for _ in range(40):
        pace.record(8, 0, 0.060)
        pace.record(8, 40, 0.060 + 40 * 0.004)
    assert pace.prefill_tokens(8) == pytest.approx(8, abs=1)


def test_a_copy_costs_as_many_tokens_as_take_its_time() -> None:
    pace = learnt(8, 0.030, 0.001)
    assert pace.load_tokens == 0
    for _ in range(40):
        pace.record_loads(2, 0.020)
    assert pace.load_tokens == pytest.approx(10, abs=1)
