"""What a caller asks for is what it gets: seeds, probabilities, biases, unary as streamed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loramux import requests
from loramux.aio import AsyncClient, AsyncStream
from loramux.launcher import Stack
from protos import common_pb2, gateway_pb2, gateway_pb2_grpc, serving
from tests.e2e.adapter_files import until

QUESTION = [{"role": "user", "content": "Where do penguins live?"}]
DRAWN = {"temperature": 1.2, "top_p": 0.95, "max_tokens": 16, "ignore_eos": True}


async def read(client: AsyncClient, prompt: Any = QUESTION, **arguments: Any) -> AsyncStream:
    stream = client.generate(prompt, **arguments)
    await stream.read()
    return stream


async def test_a_seed_draws_the_same_alone_and_in_any_company(client: AsyncClient) -> None:
    """SAM-01."""
    alone = await read(client, seed=42, **DRAWN)
    again = await read(client, seed=42, **DRAWN)
    assert again.token_ids == alone.token_ids
    others: list[dict[str, Any]] = [
        DRAWN,
        {**DRAWN, "seed": 43},
        {**DRAWN, "top_k": 5, "seed": 42},
        {"max_tokens": 16, "frequency_penalty": 1.0, "ignore_eos": True},
        {"max_tokens": 16, "adapter": "sentiment", "ignore_eos": True},
    ]
    together, *rest = await asyncio.gather(
        read(client, seed=42, **DRAWN), *(read(client, **arguments) for arguments in others)
    )
    assert together.token_ids == alone.token_ids
    assert rest[1].token_ids != alone.token_ids


async def test_without_a_seed_draws_differ(client: AsyncClient) -> None:
    drawn = await asyncio.gather(*(read(client, **DRAWN) for _ in range(4)))
    assert len({tuple(stream.token_ids) for stream in drawn}) == 4


@pytest.mark.parametrize("temperature", [1e-2, 1e-5, 1e-12, 1e-44, -0.0])
async def test_hardly_any_temperature_is_greedy(client: AsyncClient, temperature: float) -> None:
    """SAM-05."""
    greedy = await read(client, max_tokens=6)
    assert (await read(client, max_tokens=6, temperature=temperature)).token_ids == greedy.token_ids


@pytest.mark.parametrize("top_k", [1, 49152, 9_999_999])
async def test_any_top_k(client: AsyncClient, top_k: int) -> None:
    """SAM-09."""
    arguments = {"temperature": 1.0, "seed": 3, "max_tokens": 6}
    expected = {"max_tokens": 6} if top_k == 1 else arguments
    assert (await read(client, **arguments, top_k=top_k)).token_ids == (await read(client, **expected)).token_ids


async def test_a_bias_forces_and_forbids(client: AsyncClient) -> None:
    free = await read(client, max_tokens=4)
    forbidden = await read(client, max_tokens=4, logit_bias={free.token_ids[0]: -100.0})
    assert free.token_ids[0] not in forbidden.token_ids
    forced = await read(client, max_tokens=4, logit_bias={3681: 100.0})
    assert forced.token_ids == [3681] * 4


async def test_penalties_change_what_repeats(client: AsyncClient) -> None:
    either = {"max_tokens": 24, "logit_bias": {3681: 100.0, 3682: 100.0}}
    free = await read(client, **either)
    penalised = await read(client, **either, frequency_penalty=2.0)
    assert penalised.token_ids != free.token_ids
    # Each time one is said its penalty grows by 2, so before long it is the other's turn.
    assert set(penalised.token_ids) == {3681, 3682}


async def test_log_probabilities(client: AsyncClient) -> None:
    deltas = [delta async for delta in client.generate(QUESTION, max_tokens=6, logprobs=3)]
    for delta in deltas:
        assert len(delta.logprobs) == len(delta.token_ids)
        for token, position in zip(delta.token_ids, delta.logprobs, strict=True):
            top = [entry.logprob for entry in position.top]
            # Greedy: the token chosen is the likeliest.
            assert len(top) == 3 and top == sorted(top, reverse=True)
            assert position.top[0].token_id == token and position.logprob == top[0] <= 0


async def test_a_drawn_token_has_its_own_log_probability(client: AsyncClient) -> None:
    """SAM-21."""
    arguments = {**DRAWN, "temperature": 3.0, "seed": 1, "logprobs": 1}
    unlikely = 0
    async for delta in client.generate(QUESTION, **arguments):
        for token, position in zip(delta.token_ids, delta.logprobs, strict=True):
            if token != position.top[0].token_id:
                unlikely += 1
                assert position.logprob < position.top[0].logprob
    assert unlikely


@pytest.mark.parametrize("adapter", [None, "json-answer"])
async def test_unary_gives_what_the_stream_gives(stack: Stack, client: AsyncClient, adapter: str | None) -> None:
    """SAM-19: log probabilities too."""
    sampling: requests.Sampling = {"max_tokens": 12, "logprobs": 2, "temperature": 0.8, "seed": 7, "stop": ["\n\n"]}
    stream = client.generate(QUESTION, adapter=adapter, **sampling)
    logprobs = [entry async for delta in stream for entry in delta.logprobs]
    request = requests.generate_request(
        QUESTION, adapter=adapter, revision=None, alias=None, priority="normal", sampling=sampling
    )
    async with serving.channel(stack.gateway) as channel:
        call: Any = gateway_pb2_grpc.GenerationStub(channel).GenerateUnary(
            request, metadata=(("x-request-id", "mine"),)
        )
        response: gateway_pb2.GenerateResponse = await call
    (choice,) = response.choices
    assert (choice.text, list(choice.token_ids)) == (stream.text, stream.token_ids)
    # Alone or after another of the same prompt: the last digits of a float may differ, no more.
    for ours, theirs in zip(choice.logprobs, logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [entry.token_id for entry in ours.top] == [entry.token_id for entry in theirs.top]
    assert stream.accepted is not None and stream.finished is not None
    assert response.accepted.request_id == "mine"
    assert response.accepted.adapter == stream.accepted.adapter
    assert response.accepted.prompt_tokens == stream.accepted.prompt_tokens == response.finished.usage.prompt_tokens
    assert response.finished.reason == stream.finished.reason
    assert response.finished.usage.output_tokens == len(choice.token_ids)


async def test_several_choices(client: AsyncClient) -> None:
    """SAM-03."""
    single = await read(client, seed=5, **DRAWN)
    several = await read(client, seed=5, n=4, **DRAWN)
    again = await read(client, seed=5, n=4, **DRAWN)
    said = [choice.token_ids for choice in several.choices]
    assert said == [choice.token_ids for choice in again.choices]
    assert said[0] == single.token_ids
    assert len({tuple(tokens) for tokens in said}) == 4
    assert several.finished is not None
    assert [end.output_tokens for end in several.finished.choices] == [16] * 4
    assert several.finished.usage.output_tokens == 64


async def test_the_prompt_sent_back(client: AsyncClient) -> None:
    text = "The capital of France is"
    stream = await read(client, text, max_tokens=1, echo=True, prompt_logprobs=1, logprobs=1)
    assert stream.prompt is not None and stream.accepted is not None
    assert stream.prompt.text == text
    assert len(stream.prompt.token_ids) == stream.accepted.prompt_tokens == len(stream.prompt.logprobs) + 1
    # A prompt's probabilities are those its tokens would have had as output.
    *before, last = stream.prompt.token_ids
    forced = [delta async for delta in client.generate(before, max_tokens=1, logprobs=1)]
    (ours,) = forced[0].logprobs
    theirs = stream.prompt.logprobs[-1]
    assert ours.top[0].token_id == theirs.top[0].token_id
    assert theirs.top[0].logprob == pytest.approx(ours.top[0].logprob, abs=1e-3)
    assert theirs.logprob <= theirs.top[0].logprob or last == theirs.top[0].token_id


async def test_the_second_of_a_prompt_is_cached_by_adapter(client: AsyncClient) -> None:
    """KVC-01, KVC-05."""
    prompt = list(range(2000, 2064))
    cached = []
    for adapter in (None, "sentiment", None, "sentiment"):
        stream = await read(client, prompt, adapter=adapter, max_tokens=1)
        assert stream.accepted is not None
        cached.append(stream.accepted.cached_tokens)
    # Each page's keys and values depend on the adapter; the last token is always computed.
    assert cached == [0, 0, 48, 48]


@pytest.mark.parametrize("priority", ["low", "normal", "high"])
async def test_every_priority_is_served(client: AsyncClient, priority: requests.Priority) -> None:
    plain = await read(client, max_tokens=3)
    assert (await read(client, max_tokens=3, priority=priority)).token_ids == plain.token_ids


async def test_timings_add_up(client: AsyncClient) -> None:
    stream = await read(client, max_tokens=6, ignore_eos=True)
    assert stream.finished is not None
    timings = stream.finished.timings
    assert timings.prefill_s > 0 and timings.decode_s > 0 and timings.time_to_first_token_s >= timings.prefill_s
    assert min(timings.gateway_queue_s, timings.engine_queue_s) >= 0 == timings.adapter_load_s == timings.preemptions


async def test_models(stack: Stack, client: AsyncClient, demo_adapters: dict[str, Any]) -> None:
    await read(client, adapter="sentiment", max_tokens=1)
    models = await client.models()
    assert models.base_model and models.context_length >= 2048
    known = {adapter.adapter_id: adapter for adapter in models.adapters}
    assert set(demo_adapters) <= set(known)
    (replica,) = models.replicas
    assert (replica.address, replica.ready, replica.base_model) == (stack.model_servers[0], True, models.base_model)
    wanted = common_pb2.AdapterRef(adapter_id="sentiment", revision=known["sentiment"].newest_revision)

    async def resident() -> bool:
        return wanted in (await client.models()).replicas[0].resident_adapters

    await until(resident)


async def test_aliases_and_revisions(client: AsyncClient) -> None:
    listed = await client.adapters.list("sentiment")
    revision = listed.revisions[0].ref.revision

    async def known() -> bool:
        return any(adapter.aliases.get("prod") for adapter in (await client.models()).adapters)

    await client.adapters.alias("sentiment", "prod", revision)
    try:
        await until(known)
        by_alias = await read(client, adapter="sentiment", alias="prod", max_tokens=3)
        by_revision = await read(client, adapter="sentiment", revision=revision, max_tokens=3)
    finally:
        await client.adapters.alias("sentiment", "prod", None)
    assert by_alias.token_ids == by_revision.token_ids
    assert by_alias.accepted is not None and by_revision.accepted is not None
    assert by_alias.accepted.adapter == by_revision.accepted.adapter
    assert by_alias.accepted.adapter.revision == revision
