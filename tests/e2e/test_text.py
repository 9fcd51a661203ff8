"""Text as it streams: whole characters, stop strings, limits, and the reason a stream ends for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loramux.aio import AsyncClient, AsyncStream
from model_server.tokenizer import Tokenizer
from model_server.weights import open_model
from protos import common_pb2

LENGTH = common_pb2.FINISH_REASON_LENGTH
STOP = common_pb2.FINISH_REASON_STOP
EOS = common_pb2.FINISH_REASON_EOS
IM_START = 1  # special: has no text

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
REVIEW = [{"role": "user", "content": "The soup tasted like dishwater and the waiter ignored us."}]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return open_model(str(smollm2_path)).tokenizer


async def run(client: AsyncClient, prompt: Any, **arguments: Any) -> tuple[AsyncStream, list[common_pb2.Delta]]:
    """The stream, read to its end, and its deltas."""
    stream = client.generate(prompt, **arguments)
    deltas = [delta async for delta in stream]
    assert stream.finished is not None
    assert stream.finished.usage.output_tokens == len(stream.token_ids)
    return stream, deltas


def reason(stream: AsyncStream) -> common_pb2.FinishReason:
    assert stream.finished is not None
    return stream.finished.reason


@pytest.mark.parametrize("text", ["😀", "🌶️", "👨‍👩‍👧", "🇫🇷", "访问", "世界", "ďĺ", "𝔘𝔫𝔦"])
async def test_characters_of_several_tokens(client: AsyncClient, tokenizer: Tokenizer, text: str) -> None:
    """TXT-01."""
    pieces = tokenizer.encode(text)
    characters = {character for character in text if len(tokenizer.encode(character)) > 1}
    # The model is left no other tokens, and a pattern to go on with; it may still shuffle them.
    bias = dict.fromkeys(pieces, 100.0)
    stream, deltas = await run(client, tokenizer.encode(text * 12), max_tokens=33, logit_bias=bias)
    assert "".join(delta.text for delta in deltas) == stream.text == tokenizer.decode(stream.token_ids)
    assert characters & set(stream.text)
    assert set(stream.token_ids) <= set(pieces)


async def test_bytes_that_are_no_character(client: AsyncClient, tokenizer: Tokenizer) -> None:
    """TXT-05."""
    opening = tokenizer.encode("😀")[0]
    stream, _ = await run(client, "Hello", max_tokens=5, logit_bias={opening: 100.0})
    assert stream.token_ids == [opening] * 5
    assert stream.text == tokenizer.decode(stream.token_ids) and set(stream.text) == {"\ufffd"}


async def test_tokens_without_text(client: AsyncClient, tokenizer: Tokenizer) -> None:
    stream, deltas = await run(client, "Hello", max_tokens=4, logit_bias={IM_START: 100.0})
    assert stream.token_ids == [IM_START] * 4 and stream.text == "" == tokenizer.decode(stream.token_ids)
    assert [delta.index for delta in deltas] == sorted({delta.index for delta in deltas})


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
async def test_exactly_so_many_tokens(client: AsyncClient, tokenizer: Tokenizer, max_tokens: int) -> None:
    """LIM-03, LIM-09."""
    stream, _ = await run(client, QUESTION, max_tokens=max_tokens, stop=["never said"])
    assert len(stream.token_ids) == max_tokens and reason(stream) == LENGTH
    assert stream.text == tokenizer.decode(stream.token_ids)


async def test_a_stop_string_across_tokens(client: AsyncClient, tokenizer: Tokenizer) -> None:
    free, _ = await run(client, QUESTION, max_tokens=8, ignore_eos=True)
    words = [tokenizer.decode([token]) for token in free.token_ids]
    # From within the third token to within the fifth.
    stop = words[2][1:] + words[3] + words[4][:2]
    cut = free.text.index(stop)
    stream, deltas = await run(client, QUESTION, max_tokens=8, ignore_eos=True, stop=[stop, "never said"])
    assert stream.text == free.text[:cut]
    assert stream.token_ids == free.token_ids[:5]
    assert reason(stream) == STOP and stream.finished is not None and stream.finished.stop == stop
    # Nothing of it was ever sent: what has been said is always the beginning of the answer.
    assert all(free.text[:cut].startswith("".join(d.text for d in deltas[:n])) for n in range(len(deltas) + 1))


async def test_the_whole_answer_is_a_stop_string(client: AsyncClient) -> None:
    """TXT-11."""
    free, _ = await run(client, QUESTION, max_tokens=6, ignore_eos=True)
    stream, _ = await run(client, QUESTION, max_tokens=6, ignore_eos=True, stop=[free.text])
    assert stream.text == "" and reason(stream) == STOP and stream.token_ids == free.token_ids


async def test_a_stop_string_that_stays_incomplete(client: AsyncClient) -> None:
    """TXT-15."""
    free, _ = await run(client, REVIEW, adapter="sentiment", max_tokens=20)
    assert reason(free) == EOS
    stream, _ = await run(client, REVIEW, adapter="sentiment", max_tokens=20, stop=[free.text + "!"])
    assert stream.text == free.text and reason(stream) == EOS


async def test_reasons_at_the_limit(client: AsyncClient) -> None:
    """LIM-05: the limit alone is "length"; what completes exactly at the limit goes before it."""
    free, _ = await run(client, REVIEW, adapter="sentiment", max_tokens=20)
    needed = len(free.token_ids)
    at_limit, _ = await run(client, REVIEW, adapter="sentiment", max_tokens=needed)
    assert reason(at_limit) == EOS and at_limit.text == free.text
    short, _ = await run(client, REVIEW, adapter="sentiment", max_tokens=needed - 1)
    assert reason(short) == LENGTH and short.token_ids == free.token_ids[:-1]
    stopped, _ = await run(client, REVIEW, adapter="sentiment", max_tokens=needed - 1, stop=[free.text[-2:]])
    assert reason(stopped) == STOP and stopped.text == free.text[:-2]


async def test_a_stop_token(client: AsyncClient) -> None:
    free, _ = await run(client, QUESTION, max_tokens=6, ignore_eos=True)
    token = free.token_ids[3]
    stream, _ = await run(client, QUESTION, max_tokens=6, stop_token_ids=[token])
    assert stream.token_ids == free.token_ids[: free.token_ids.index(token) + 1]
    assert reason(stream) == STOP and stream.finished is not None and stream.finished.stop_token_id == token


async def test_min_tokens_holds_every_ending_back(client: AsyncClient) -> None:
    free, _ = await run(client, REVIEW, adapter="sentiment", max_tokens=20)
    longer = len(free.token_ids) + 4
    arguments = {"adapter": "sentiment", "max_tokens": 30, "min_tokens": longer}
    stream, _ = await run(client, REVIEW, **arguments, stop=[free.text[:3]])
    assert len(stream.token_ids) >= longer and stream.text.startswith(free.text)
    assert free.token_ids[-1] not in stream.token_ids[: longer - 1]


async def test_ignore_eos_goes_on_to_the_limit(client: AsyncClient, tokenizer: Tokenizer) -> None:
    free, _ = await run(client, REVIEW, adapter="sentiment", max_tokens=20)
    stream, _ = await run(client, REVIEW, adapter="sentiment", max_tokens=12, ignore_eos=True)
    assert len(stream.token_ids) == 12 and reason(stream) == LENGTH
    assert stream.token_ids[: len(free.token_ids)] == free.token_ids
    assert stream.text == tokenizer.decode(stream.token_ids)
