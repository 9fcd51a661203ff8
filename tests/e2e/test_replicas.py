"""Two model servers: both carry the load, and one that dies takes only its own streams with it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from loramux.aio import AsyncClient
from loramux.config import StackConfig
from loramux.launcher import Stack
from protos.errors import ServiceError
from tests.e2e.adapter_files import until

PROMPTS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Tell me about dogs.",
    "List three primary colors.",
)
NUM_STREAMS = 40
NUM_TOKENS = 32

Case = tuple[str | None, str]


@dataclass
class Answer:
    replica: str  # empty: it never began
    tokens: list[int]
    error: ServiceError | None


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, demo_adapters: dict[str, Path]) -> Iterator[Stack]:
    # One thread each: two servers that both take every core only wait for each other.
    settings = {"LORAMUX_MODEL_SERVER_NUM_THREADS": "1", "LORAMUX_MODEL_SERVER_CHECK_EVERY_STEP": "true"}
    config = StackConfig(data_dir=tmp_path_factory.mktemp("pair"), replicas=2, settings=settings)
    with Stack(config) as pair:
        with pair.client() as client:
            for adapter_id, directory in demo_adapters.items():
                client.adapters.push(directory, adapter_id)
        yield pair


@pytest.fixture
async def client(pair: Stack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(pair.gateway, adapter_store=pair.adapter_store) as client:

        async def all_ready() -> bool:
            models = await client.models()
            return sum(replica.ready for replica in models.replicas) == 2 and bool(models.adapters)

        await until(all_ready)
        yield client


@pytest.fixture(scope="module")
def cases(demo_adapters: dict[str, Path]) -> list[Case]:
    targets = (None, *demo_adapters)
    return [(targets[i % len(targets)], PROMPTS[i // len(targets) % len(PROMPTS)]) for i in range(NUM_STREAMS)]


class Load:
    """All cases as concurrent streams; `begun` is set once each has had its first token, or has ended."""

    def __init__(self, client: AsyncClient, cases: list[Case]) -> None:
        self._waiting = len(cases)
        self.begun = asyncio.Event()
        self._tasks = [asyncio.create_task(self._one(client, case)) for case in cases]

    async def answers(self) -> list[Answer]:
        return await asyncio.gather(*self._tasks)

    async def _one(self, client: AsyncClient, case: Case) -> Answer:
        adapter, prompt = case
        error, first = None, True
        chat = [{"role": "user", "content": prompt}]
        stream = client.generate(chat, adapter=adapter, max_tokens=NUM_TOKENS, ignore_eos=True)
        try:
            async for _ in stream:
                if first:
                    self._begin()
                first = False
        except ServiceError as failure:
            error = failure
        if first:
            self._begin()
        if error is None and stream.accepted is not None:
            assert stream.accepted.adapter.adapter_id == (adapter or "")
        return Answer(stream.accepted.replica if stream.accepted else "", stream.token_ids, error)

    def _begin(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            self.begun.set()


def expected_of(cases: list[Case], answers: list[Answer]) -> dict[Case, list[int]]:
    """Each case's tokens, which must be the same wherever and next to whom it ran."""
    found: dict[Case, list[int]] = {}
    for case, answer in zip(cases, answers, strict=True):
        assert answer.error is None, str(answer.error)
        assert len(answer.tokens) == NUM_TOKENS
        assert found.setdefault(case, answer.tokens) == answer.tokens, case
    return found


async def lose_one(
    pair: Stack, client: AsyncClient, cases: list[Case], expected: dict[Case, list[int]], how: str
) -> None:
    """Run all cases, end model server 0 while they run, and say who may suffer."""
    name, address = pair.model_server_names[0], pair.model_servers[0]
    load = Load(client, cases)
    await load.begun.wait()
    if how == "server":
        await asyncio.to_thread(pair.kill, name)
    else:
        for child in psutil.Process(pair.processes[name].pid).children():
            child.kill()
    lost = 0
    for case, answer in zip(cases, await load.answers(), strict=True):
        if answer.error is None:
            assert answer.tokens == expected[case]
            continue
        lost += 1
        assert answer.replica == address, f"{case} ran on {answer.replica}: {answer.error}"
        assert answer.error.code is grpc.StatusCode.UNAVAILABLE
        # What had been said until then was right.
        assert answer.tokens == expected[case][: len(answer.tokens)] and len(answer.tokens) < NUM_TOKENS
    assert lost

    # Meanwhile everybody is served by the other; then the lost one again, adapters and all.
    alone = await Load(client, cases[:4]).answers()
    assert {answer.replica for answer in alone} == {pair.model_servers[1]}
    await asyncio.to_thread(pair.restart, name)

    async def ready_again() -> bool:
        return all(replica.ready for replica in (await client.models()).replicas)

    await until(ready_again)
    some = cases[:16]
    answers = await Load(client, some).answers()
    assert all(expected[case] == tokens for case, tokens in expected_of(some, answers).items())
    assert_balanced(pair, answers)
    assert any(case[0] and answer.replica == address for case, answer in zip(some, answers, strict=True))


def assert_balanced(pair: Stack, answers: list[Answer]) -> None:
    counts = Counter(answer.replica for answer in answers)
    assert set(counts) == set(pair.model_servers)
    assert min(counts.values()) >= 0.4 * len(answers), counts


async def test_both_share_the_load_and_one_is_lost(pair: Stack, client: AsyncClient, cases: list[Case]) -> None:
    answers = await Load(client, cases).answers()
    expected = expected_of(cases, answers)
    assert_balanced(pair, answers)
    await lose_one(pair, client, cases, expected, "server")


async def test_an_engine_that_dies_takes_its_server_with_it(
    pair: Stack, client: AsyncClient, cases: list[Case]
) -> None:
    expected = expected_of(cases, await Load(client, cases).answers())
    await lose_one(pair, client, cases, expected, "engine")
