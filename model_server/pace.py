"""How long steps take, learnt from those that ran; and from that how much prefill a step can take beside its decodes.

Decodes share their steps with newcomers' prompts. How much slower that makes them depends on model, machine and batch, so it is
not configured in tokens but bounded as a share of what the decodes would take alone. Sarathi-Serve (Agrawal et al., OSDI 2024)
bounds a step by a token budget for the same end; here the budget follows from the times. Pure: times are arguments.

A step is taken to last fixed + decodes * decode_s + prefill tokens * token_s, three unknowns that drift: a Kalman filter
(Kalman, 1960) follows them.
"""

from __future__ import annotations

# Features are brought to about 1.
_DECODES, _TOKENS = 16.0, 64.0
# Variances against that of one step's time. At first (the fixed part is taken for small, so that tokens are not thought cheap
# before it shows); more by each step; and below which a step that took far longer than expected was disturbed, not misjudged.
_AT_FIRST = (1.0, 1e3, 1e3)
_DRIFT, _KNOWN = 2e-3, 0.2
_FIRST_SAMPLES = 3
# Prefill beside decodes never gets fewer tokens a step: a prompt's progress must not depend on an estimate.
LEAST_TOKENS = 8
_MOST_TOKENS = 1e6
_LOAD_WEIGHT = 0.25


class Pace:
    """`max_slowdown`: prefill makes a step so many times longer than its decodes alone, but for LEAST_TOKENS."""

    def __init__(self, max_slowdown: float) -> None:
        self._max_slowdown = max_slowdown
        self._times = [0.0, 0.0, 0.0]  # fixed, of _DECODES decodes, of _TOKENS tokens
        self._unknown = [[_AT_FIRST[row] if row == column else 0.0 for column in range(3)] for row in range(3)]
        self._num_samples = 0
        self._most_tokens = 0  # of prefill in a step so far
        self._load_s = 0.0  # of copying one adapter to the device, where the step waits for it

    def record(self, decodes: int, prefill_tokens: int, seconds: float) -> None:
        """A step ran."""
        x = (1.0, decodes / _DECODES, prefill_tokens / _TOKENS)
        expected_s = sum(time * feature for time, feature in zip(self._times, x, strict=True))
        spread = [sum(row[i] * x[i] for i in range(3)) for row in self._unknown]
        unknown = max(0.0, sum(spread[i] * x[i] for i in range(3)))
        if unknown < _KNOWN:
            seconds = min(seconds, 2 * max(expected_s, 0.0))
        for i in range(3):
            self._times[i] += spread[i] / (1 + unknown) * (seconds - expected_s)
            for j in range(3):
                self._unknown[i][j] -= spread[i] * spread[j] / (1 + unknown)
            self._unknown[i][i] = min(_AT_FIRST[i], self._unknown[i][i] + _DRIFT)
        self._num_samples += 1
        self._most_tokens = max(self._most_tokens, prefill_tokens)

    def record_loads(self, loads: int, seconds: float) -> None:
        """The step waited for so many adapters to be copied."""
        each_s = seconds / loads
        self._load_s = self._load_s + _LOAD_WEIGHT * (each_s - self._load_s) if self._load_s else each_s

    def prefill_tokens(self, decodes: int) -> int:
        """How many tokens of prompts a step of so many decodes may take on."""
        alone_s = self._times[0] + decodes / _DECODES * self._times[1]
        tokens = self._tokens(max(0.0, alone_s) * (self._max_slowdown - 1), LEAST_TOKENS)
        return min(tokens, max(LEAST_TOKENS, 2 * self._most_tokens))  # what was never seen is only guessed at

    @property
    def load_tokens(self) -> int:
        """How many tokens of prefill take as long as copying one adapter."""
        return self._tokens(self._load_s, 0)

    def _tokens(self, seconds: float, least: int) -> int:
        token_s = self._times[2] / _TOKENS
        if self._num_samples < _FIRST_SAMPLES:
            return least
        return int(min(_MOST_TOKENS, max(least, seconds / max(token_s, 1e-9))))
