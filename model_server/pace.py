"""How long steps take, learnt from those that ran; and from that how much prefill a step can take beside its decodes.

Decodes share their steps with newcomers' prompts. How much slower that makes them depends on model, device and batch, so it is
not configured in tokens but bounded as a share of what the decodes would take alone. Sarathi-Serve (Agrawal et al., OSDI 2024)
bounds a step by a token budget for the same end; here the budget follows from the times. Pure: times are arguments.
"""

from __future__ import annotations

# Of what a new sample weighs against those before it.
_WEIGHT = 0.25
# Prefill beside decodes never gets fewer tokens a step: a prompt's progress must not depend on an estimate.
LEAST_TOKENS = 8


class Pace:
    """`max_slowdown`: a step with prefill takes at most so many times what its decodes take alone."""

    def __init__(self, max_slowdown: float) -> None:
        self._max_slowdown = max_slowdown
        # The last step of decodes alone: its rows and time.
        self._base_rows = 0
        self._base_s = 0.0
        self._row_s = 0.0  # of a row beyond those
        self._load_s = 0.0  # of copying one adapter to the device, where the step waits for it

    def record(self, decodes: int, prefill_tokens: int, seconds: float) -> None:
        """A step ran."""
        expected_s = self._base_s + self._row_s * max(0, decodes - self._base_rows)
        if not prefill_tokens:
            self._base_s = expected_s + _WEIGHT * (seconds - expected_s) if self._base_rows else seconds
            self._base_rows = decodes
            return
        rows = decodes + prefill_tokens - (self._base_rows if decodes else 0)
        row_s = max(0.0, seconds - (self._base_s if decodes else 0.0)) / max(1, rows)
        self._row_s = self._row_s + _WEIGHT * (row_s - self._row_s) if self._row_s else row_s

    def record_loads(self, loads: int, seconds: float) -> None:
        """The step waited for so many adapters to be copied."""
        self._load_s += _WEIGHT * (seconds / loads - self._load_s)

    def prefill_tokens(self, decodes: int) -> int:
        """How many tokens of prompts a step of so many decodes may take on."""
        if not self._row_s or not self._base_rows:
            return LEAST_TOKENS
        alone_s = self._base_s + self._row_s * max(0, decodes - self._base_rows)
        return max(LEAST_TOKENS, int(alone_s * (self._max_slowdown - 1) / self._row_s))

    @property
    def load_tokens(self) -> int:
        """How many tokens of prefill take as long as copying one adapter."""
        return int(self._load_s / self._row_s) if self._row_s else 0
