"""The runner protocol as a cost model on a virtual clock: schedules of a million requests in seconds, no torch.

A step costs `base_s` + tokens × `token_s` + the adapter loads it waited for; a load ahead goes on beside it. The "model" is a
hash of the whole prefix and the adapter revision, so an output differs as soon as any token, position or adapter was mixed up:
replayed tokens after a preemption, pages of another adapter and wrong chunk starts all show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from model_server.adapter_bank import Load
from model_server.request import AdapterRef
from model_server.runner import Chunk, RunnerInfo, Sampled, StepResult


@dataclass(slots=True)
class VirtualClock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def prefix_digests(tokens: Sequence[int], revision: str) -> list[int]:
    """For each token, a digest of the revision and all tokens up to and with it."""
    digests, digest = [], crc32(revision.encode())
    for token in tokens:
        digest = crc32(token.to_bytes(4), digest)
        digests.append(digest)
    return digests


def expected_token(tokens: Sequence[int], revision: str, vocab_size: int) -> int:
    """What the simulated model answers after these tokens."""
    return prefix_digests(tokens, revision)[-1] % vocab_size


class SimulatedRunner:
    """Keeps a model of the pages' contents: per slot, the digest of the prefix that was computed into it."""

    def __init__(
        self,
        info: RunnerInfo,
        clock: VirtualClock,
        *,
        base_s: float = 0.01,
        token_s: float = 0.0005,
        load_s: float = 0.002,
    ) -> None:
        self._info = info
        self._clock = clock
        self._base_s, self._token_s, self._load_s = base_s, token_s, load_s
        self._slots: dict[int, int] = {}
        self._adapters: dict[int, str] = {}
        self.num_steps = 0
        self.max_step_tokens = 0

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def load_adapter(self, adapter_index: int, rank_rows: Mapping[str, Sequence[int]], weights: Any) -> None:
        self._adapters[adapter_index] = weights
        self._clock.now_s += self._load_s

    def run(self, chunks: Sequence[Chunk], ahead: Load | None = None) -> StepResult:
        assert len({id(chunk.request) for chunk in chunks}) == len(chunks), "a request twice in one step"
        tokens = sum(chunk.length for chunk in chunks)
        self.max_step_tokens = max(self.max_step_tokens, tokens)
        self.num_steps += 1
        self._clock.now_s += max(self._base_s + tokens * self._token_s, self._load_s if ahead else 0.0)
        result = StepResult([self._compute(chunk) for chunk in chunks])
        if ahead is not None:
            self._adapters[ahead.index] = ahead.weights
        return result

    def _compute(self, chunk: Chunk) -> Sampled | None:
        request = chunk.request
        revision = _revision(request.adapter)
        assert self._adapters.get(request.adapter_index, "") == revision, "another adapter stands at this index"
        end = chunk.start + chunk.length
        digests = prefix_digests(request.tokens(0, end), revision)
        for position in range(chunk.start, end):
            self._slots[self._slot(chunk, position)] = digests[position]
        for position in range(end):
            assert self._slots.get(self._slot(chunk, position)) == digests[position], "a page holds something else"
        return Sampled(digests[-1] % self._info.vocab_size) if chunk.samples else None

    def _slot(self, chunk: Chunk, position: int) -> int:
        page_size = self._info.page_size
        return chunk.request.page_table[position // page_size] * page_size + position % page_size


def _revision(adapter: AdapterRef | None) -> str:
    return "" if adapter is None else adapter.revision
