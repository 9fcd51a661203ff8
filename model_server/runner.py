"""The runner protocol: what the engine needs of whatever computes a step. Plain data in, plain data out; no torch here.

Implementations: torch_runner.py (a real model on a device) and simulated_runner.py (a cost model on a virtual clock).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from model_server.adapter_bank import Load
from model_server.request import Request


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """The runner's fixed capacity, known once it has loaded."""

    model_name: str
    num_pages: int
    page_size: int
    kv_bytes: int  # of all pages
    adapter_bytes: int  # of the bank's rank rows
    num_rank_rows: Mapping[str, int]  # rows of the bank per group of projections
    max_adapters: int
    max_rank: int
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    fixed_rows: float | None = None  # a step of n rows takes as long as n + fixed_rows rows; None: not measured
    loads_ahead: bool = False  # a load given to `run` goes on beside the step and takes no time from it


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `start + length` of one request's prompt-plus-output, computed in one step.

    `samples` is true where the chunk ends at the last known token, so that the step yields the next one.
    """

    request: Request
    start: int
    length: int
    samples: bool

    @property
    def scored(self) -> range:
        return self.request.scored_by(self.start, self.length)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One request's newly sampled token, with log probabilities when it asked for them."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """`sampled[i]` belongs to `chunks[i]`; None where that chunk does not sample. `scored[i]`: the prompt tokens that
    follow the positions of `chunks[i].scored`, with their log probabilities; missing where none were asked for."""

    sampled: list[Sampled | None] = field(default_factory=list)
    scored: dict[int, list[Sampled]] = field(default_factory=dict)


class Runner(Protocol):
    @property
    def info(self) -> RunnerInfo: ...

    def load_adapter(self, adapter_index: int, rank_rows: Mapping[str, Sequence[int]], weights: Any) -> None:
        """Copy host weights (what adapter_layout.py laid out) into the bank's rows. Called between steps only."""

    def run(self, chunks: Sequence[Chunk], ahead: Load | None = None) -> StepResult:
        """`ahead`: a load that this step does not need; the next one may."""
