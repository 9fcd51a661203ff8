"""A request inside the engine: what was asked, how far it is, what it holds. Pure data; the scheduler moves its state."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class State(enum.Enum):
    WAITING = "waiting"  # ready to be scheduled, holds no pages
    PARKED = "parked"  # its adapter is not in host memory yet
    RUNNING = "running"  # holds pages
    FINISHED = "finished"


class Finish(enum.Enum):
    LENGTH = "length"
    STOP = "stop"
    EOS = "eos"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class AdapterRef:
    adapter_id: str
    revision: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """Validated and complete: the servicer has filled in every default."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def plain(self) -> bool:
        """True when the raw logits' argmax is the answer and nothing else is asked of them."""
        return (
            self.greedy
            and self.repetition_penalty == 1.0
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
            and not self.logit_bias
            and not self.min_tokens
            and self.logprobs is None
        )


@dataclass(slots=True, eq=False)
class Request:
    """Times are seconds on the engine's clock (monotonic)."""

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    adapter: AdapterRef | None = None
    priority: int = 1  # 0 low, 1 normal, 2 high
    tenant: str = ""
    arrived_s: float = 0.0
    deadline_s: float | None = None

    state: State = State.WAITING
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens whose K and V stand in pages
    page_table: list[int] = field(default_factory=list)
    adapter_index: int = -1  # valid while RUNNING

    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    parked_since_s: float | None = None
    adapter_load_s: float = 0.0
    num_preemptions: int = 0
    num_cached: int = 0
    num_scored: int = 0  # prompt tokens whose log probability has been reported
    num_bypassed: int = 0  # times a later request was admitted while this one did not fit
    page_keys: list[bytes] = field(default_factory=list)  # prefix_cache.py's hash chain over full pages

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids `start` to `stop` of prompt and output joined."""
        num_prompt = len(self.prompt_ids)
        if stop <= num_prompt:
            return self.prompt_ids[start:stop]
        if start >= num_prompt:
            return self.output_ids[start - num_prompt : stop - num_prompt]
        return self.prompt_ids[start:] + self.output_ids[: stop - num_prompt]

    def scored_by(self, start: int, length: int) -> range:
        """The positions among `start` to `start + length` whose logits give the next prompt token's log probability,
        where that was asked for and has not been reported before."""
        if self.sampling.prompt_logprobs is None:
            return range(0)
        return range(max(start, self.num_scored), min(start + length, len(self.prompt_ids) - 1))

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed
