"""The product's proof: many adapters multiplexed give exactly what each request gives alone with transformers + PEFT.

Every prompt for the base model, each demonstration adapter and three random adapters, all in flight together through the
gateway: greedy tokens equal, and the logits of every step within 1e-3 (they are of order 10). The same with requests that
join while others decode, and with a KV pool so small that requests wait and are preempted.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from demo.prompts import DEMO_PROMPTS
from loramux.aio import AsyncClient
from loramux.config import StackConfig
from loramux.launcher import Stack
from tests.e2e.oracle import Oracle

PROMPTS = DEMO_PROMPTS[:20]
NUM_TOKENS = 8
TOLERANCE = 1e-3

Case = tuple[str | None, int]  # adapter, index of the prompt


@dataclass
class Answer:
    tokens: list[int]
    logits: Tensor  # [NUM_TOKENS, V]
    prompt_tokens: int
    preemptions: int


class Expected:
    """The oracle's logits for an output, computed once per output: three tests ask about the same ones."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._known: dict[tuple[Case, tuple[int, ...]], Tensor] = {}

    def logits(self, case: Case, tokens: list[int]) -> Tensor:
        key = case, tuple(tokens)
        if key not in self._known:
            adapter, prompt = case
            self._known[key] = self._oracle.logits(adapter, self._oracle.chat_ids(PROMPTS[prompt]), tokens)
        return self._known[key]


@pytest.fixture(scope="module")
def oracle(smollm2_path: Path, demo_adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(smollm2_path, demo_adapters, tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def adapters(oracle: Oracle) -> dict[str, Path]:
    return oracle.adapters


@pytest.fixture(scope="module")
def expected(oracle: Oracle) -> Expected:
    return Expected(oracle)


@pytest.fixture(scope="module")
def cases(adapters: dict[str, Path]) -> list[Case]:
    assert len(adapters) >= 6
    return [(target, prompt) for prompt in range(len(PROMPTS)) for target in (None, *adapters)]


def _stack(directory: Path, adapters: dict[str, Path], **settings: str) -> Iterator[Stack]:
    (directory / "logits").mkdir()
    settings |= {"LOGITS_DIR": str(directory / "logits"), "CHECK_EVERY_STEP": "true"}
    named = {f"LORAMUX_MODEL_SERVER_{name}": value for name, value in settings.items()}
    with Stack(StackConfig(data_dir=directory, settings=named | {"LORAMUX_GATEWAY_MAX_OUTSTANDING": "500"})) as stack:
        with stack.client() as client:
            for name, path in adapters.items():
                client.adapters.push(path, name)
        yield stack


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory, adapters: dict[str, Path]) -> Iterator[Stack]:
    yield from _stack(tmp_path_factory.mktemp("roomy"), adapters, MAX_RUNNING="200", PREFIX_CACHE="false")


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory, adapters: dict[str, Path]) -> Iterator[Stack]:
    # 24 pages of 16 tokens: room for about six of these requests. Chunks of 24: most prompts take two steps.
    pages = 24 * 2 * 30 * 3 * 64 * 16 * 4
    yield from _stack(tmp_path_factory.mktemp("tight"), adapters, KV_BYTES=str(pages), MAX_PREFILL_TOKENS="24")


async def _ask(stack: Stack, cases: list[Case], spread_s: float, tag: str) -> dict[Case, Answer]:
    shuffled = random.Random(0)

    async def one(client: AsyncClient, case: Case) -> tuple[Case, Answer]:
        adapter, prompt = case
        await asyncio.sleep(shuffled.random() * spread_s)
        request_id = f"{tag}-{adapter or 'base'}-{prompt}"
        chat = [{"role": "user", "content": PROMPTS[prompt]}]
        async with client.generate(
            chat, adapter=adapter, max_tokens=NUM_TOKENS, ignore_eos=True, request_id=request_id, timeout_s=900
        ) as stream:
            await stream.read()
            assert stream.accepted is not None and stream.finished is not None
            assert stream.accepted.adapter.adapter_id == (adapter or "")
            dump = np.fromfile(stack.config.data_dir / "logits" / f"{request_id}.f32", dtype=np.float32)
            logits = torch.from_numpy(dump.reshape(len(stream.token_ids), -1))
            return case, Answer(
                stream.token_ids, logits, stream.accepted.prompt_tokens, stream.finished.timings.preemptions
            )

    async with AsyncClient(stack.gateway) as client:
        return dict(await asyncio.gather(*(one(client, case) for case in cases)))


def _check(answers: dict[Case, Answer], expected: Expected, oracle: Oracle) -> None:
    worst = 0.0
    for case, answer in sorted(answers.items(), key=lambda item: item[0][0] or ""):
        assert answer.prompt_tokens == len(oracle.chat_ids(PROMPTS[case[1]]))
        logits = expected.logits(case, answer.tokens)
        assert len(answer.tokens) == NUM_TOKENS
        assert logits.argmax(dim=1).tolist() == answer.tokens, f"{case}: not the greedy output"
        worst = max(worst, float((logits - answer.logits).abs().max()))
    print(f"{len(answers)} requests, largest difference of a logit {worst:.2e}")
    assert worst < TOLERANCE


async def test_all_in_flight_together(roomy: Stack, cases: list[Case], expected: Expected, oracle: Oracle) -> None:
    answers = await _ask(roomy, cases, 0.0, "together")
    _check(answers, expected, oracle)
    # The adapters do something: otherwise equality would prove little.
    for adapter in {case[0] for case in cases} - {None}:
        changed = [answers[adapter, p].tokens != answers[None, p].tokens for p in range(len(PROMPTS))]
        assert sum(changed) >= len(PROMPTS) / 5, adapter
    # The argument "each token is its row's argmax" against transformers' own generation loop.
    for case in cases[:7]:
        assert oracle.generate(case[0], oracle.chat_ids(PROMPTS[case[1]]), NUM_TOKENS) == answers[case].tokens


async def test_joining_midway(roomy: Stack, cases: list[Case], expected: Expected, oracle: Oracle) -> None:
    _check(await _ask(roomy, cases, 10.0, "midway"), expected, oracle)


async def test_in_a_tight_pool(tight: Stack, cases: list[Case], expected: Expected, oracle: Oracle) -> None:
    answers = await _ask(tight, cases, 0.0, "tight")
    _check(answers, expected, oracle)
