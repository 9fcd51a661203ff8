"""What steps took, and what follows for prefill beside decodes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from model_server.pace import LEAST_TOKENS, Pace

SLOWDOWN = 1.25


def seconds(fixed_s: float, decode_s: float, token_s: float) -> Callable[[int, int], float]:
    return lambda decodes, tokens: fixed_s + decodes * decode_s + tokens * token_s


def learnt(
    machine: Callable[[int, int], float], decodes: int = 8, *, noise: float = 0.1, steps: int = 200, seed: int = 0
) -> Pace:
    """After an engine's life: a prompt alone, then decodes, half of the steps with as much prefill as it allows itself."""
    pace, random = Pace(SLOWDOWN), Random(seed)
    pace.record(0, 100, machine(0, 100))
    for step in range(steps):
        tokens = pace.prefill_tokens(decodes) if step % 2 else 0
        pace.record(decodes, tokens, machine(decodes, tokens) * random.uniform(1 - noise, 1 + noise))
    return pace


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("machine", "tokens"),
    [(seconds(0.020, 0.0012, 0.0004), 18), (seconds(0.050, 0.0100, 0.0005), 65), (seconds(0.010, 0.0005, 0.0001), 35)],
)
def test_prefill_gets_the_share_of_a_step(machine: Callable[[int, int], float], tokens: int, seed: int) -> None:
    assert learnt(machine, seed=seed).prefill_tokens(8) == pytest.approx(tokens, rel=0.4)
    assert learnt(machine, seed=seed, noise=0).prefill_tokens(8) == pytest.approx(tokens, rel=0.15)


@pytest.mark.parametrize(("before", "now"), [(4, 60), (64, 4)])
def test_it_knows_the_time_of_decodes_that_were_never_alone(before: int, now: int) -> None:
    """Since there are so many (or few), every step had prefill."""
    machine = seconds(0.010, 0.001, 0.0001)
    pace, random = learnt(machine, before), Random(1)
    for _ in range(150):
        tokens = pace.prefill_tokens(now)
        pace.record(now, tokens, machine(now, tokens) * random.uniform(0.95, 1.05))
    assert pace.prefill_tokens(now) == pytest.approx((SLOWDOWN - 1) * machine(now, 0) / 0.0001, rel=0.3)


@pytest.mark.parametrize("seed", range(5))
def test_steps_that_are_all_alike_teach_nothing_wrong(seed: int) -> None:
    """Neither what a token costs nor what a decode does shows in them; noise must not be taken for it."""
    machine, random = seconds(0.020, 0.0015, 0.0015), Random(seed)
    pace = learnt(machine, 16, seed=seed)
    right = (SLOWDOWN - 1) * machine(16, 0) / 0.0015
    for step in range(3000):
        pace.record(16, 0, machine(16, 0) * random.uniform(0.8, 1.2))
        if step % 100 == 0:
            assert pace.prefill_tokens(16) <= 3 * right


def test_a_prompt_goes_on_whatever_was_measured() -> None:
    assert Pace(SLOWDOWN).prefill_tokens(8) == LEAST_TOKENS
    assert learnt(seconds(0.03, 0.001, 0.1)).prefill_tokens(8) == LEAST_TOKENS
    assert Pace(1.0).prefill_tokens(8) == LEAST_TOKENS


def test_no_time_at_all_is_no_error() -> None:
    pace = learnt(seconds(0.0, 0.0, 0.0))
    for _ in range(5000):
        pace.record(8, 16, 0.0)
    assert pace.prefill_tokens(8) >= LEAST_TOKENS and pace.load_tokens == 0
    pace.record_loads(1, 1e9)
    assert pace.load_tokens >= 0


def test_what_was_never_seen_is_approached() -> None:
    """Tokens that seem to cost nothing: at most twice the most that a step has had."""
    assert learnt(seconds(0.03, 0.0, 0.0), steps=4, noise=0).prefill_tokens(8) <= 2 * 2 * 2 * 100


def test_it_follows_a_machine_that_changes_and_forgives_a_step_that_was_disturbed() -> None:
    pace = learnt(seconds(0.020, 0.0010, 0.0004), noise=0)
    before = pace.prefill_tokens(8)
    pace.record(8, 0, 5.0)
    assert pace.prefill_tokens(8) <= 2 * before
    slower = seconds(0.020, 0.0010, 0.0016)
    for step in range(150):
        tokens = pace.prefill_tokens(8) if step % 2 else 0
        pace.record(8, tokens, slower(8, tokens))
    assert pace.prefill_tokens(8) == pytest.approx(LEAST_TOKENS, abs=1)


def test_a_copy_costs_as_many_tokens_as_take_its_time() -> None:
    pace = learnt(seconds(0.030, 0.001, 0.001), noise=0)
    assert pace.load_tokens == 0
    pace.record_loads(2, 0.020)
    assert pace.load_tokens == pytest.approx(10, abs=2)
