"""The whole stack on a two-layer model: memory for 256 tokens of a context of 512, chunks of seven tokens, a bank that holds
half the adapters, and a vocabulary padded past the tokenizer's. Answers are those of transformers and PEFT alone."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM

from loramux import requests
from loramux.aio import AsyncClient, AsyncStream
from loramux.config import StackConfig
from loramux.launcher import Stack
from model_server.torch_runner import bank_bytes_per_rank_row, kv_bytes_per_page
from model_server.weights.huggingface import HuggingFaceDirectory
from protos import common_pb2, gateway_pb2, gateway_pb2_grpc, serving
from protos.errors import ServiceError
from tests.e2e import adapter_files
from tests.e2e.adapter_files import Q_PROJ, publish
from tests.model_server.tiny import ADAPTERS, VOCAB, TinyModel

NUM_PAGES = 16
BANK_ROWS = 20
CONTEXT = NUM_PAGES * 16
WORDS = ["<s>", "<unused>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
PADDED = len(WORDS) + 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    tiny = TinyModel(tmp_path_factory.mktemp("tiny"))
    tokenizer = Tokenizer(BPE(vocab={word: index for index, word in enumerate(WORDS)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tiny.directory / "tokenizer.json"))
    return tiny


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny: TinyModel) -> Iterator[Stack]:
    config = HuggingFaceDirectory(tiny.directory).config
    settings = {
        "KV_BYTES": NUM_PAGES * kv_bytes_per_page(config, torch.float32),
        "ADAPTER_BYTES": BANK_ROWS * bank_bytes_per_rank_row(config, torch.float32),
        "MAX_PREFILL_TOKENS": 7,
        "NUM_THREADS": 1,
        "CHECK_EVERY_STEP": "true",
    }
    named = {f"LORAMUX_MODEL_SERVER_{name}": str(value) for name, value in settings.items()}
    with Stack(StackConfig(tmp_path_factory.mktemp("small"), str(tiny.directory), settings=named)) as stack:
        with stack.client() as client:
            for name, directory in tiny.adapters.items():
                client.adapters.push(directory, name)
        yield stack


def prompt(seed: int, length: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB) for _ in range(length)]


async def read(client: AsyncClient, ids: list[int], **arguments: Any) -> AsyncStream:
    stream = client.generate(ids, **{"ignore_eos": True} | arguments)
    await stream.read()
    return stream


async def refusal(client: AsyncClient, ids: Any, **arguments: Any) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await client.generate(ids, **arguments).read()
    return caught.value


# Equal to PEFT --------------------------------------------------------------------------------------------------------


async def test_three_choices_each_of_everyone_at_once(client: AsyncClient, tiny: TinyModel) -> None:
    """Three choices that share the prompt's pages, every adapter and the base, too many for the pages there are."""
    asked = [(target, prompt(seed, 30 + 5 * seed)) for seed in range(2) for target in (None, *ADAPTERS)]
    streams = await asyncio.gather(*(read(client, ids, adapter=target, n=3, max_tokens=48) for target, ids in asked))
    num_preemptions = 0
    for (target, ids), stream in zip(asked, streams, strict=True):
        expected = tiny.greedy(target, ids, 48)
        assert [choice.token_ids for choice in stream.choices] == [expected] * 3, target
        assert stream.finished is not None
        num_preemptions += stream.finished.timings.preemptions
    assert num_preemptions > 0


async def test_choices_that_part_are_each_the_models_own(client: AsyncClient, tiny: TinyModel) -> None:
    """SAM-03: four drawn answers differ, come again with the seed, and have PEFT's probabilities token for token."""
    ids = prompt(30, 37)
    arguments: dict[str, Any] = {
        "n": 4,
        "seed": 1,
        "temperature": 1.0,
        "max_tokens": 12,
        "logprobs": 0,
        "ignore_eos": True,
    }
    said: list[list[list[int]]] = []
    for _ in range(2):
        tokens: list[list[int]] = [[], [], [], []]
        logprobs: list[list[float]] = [[], [], [], []]
        async for delta in client.generate(ids, adapter="all8", **arguments):
            assert delta.index == len(tokens[delta.choice])
            tokens[delta.choice] += delta.token_ids
            logprobs[delta.choice] += [position.logprob for position in delta.logprobs]
        for output, ours in zip(tokens, logprobs, strict=True):
            rows = torch.log_softmax(tiny.logits("all8", [*ids, *output]), dim=-1)[len(ids) - 1 :]
            theirs = [float(row[token]) for row, token in zip(rows, output, strict=False)]
            assert ours == pytest.approx(theirs, abs=1e-3)
        said.append(tokens)
    assert said[0] == said[1]
    assert len({tuple(output) for output in said[0]}) == 4


async def test_a_reload_under_the_same_name(client: AsyncClient, tiny: TinyModel, tmp_path: Path) -> None:
    """KVC-03: the long prompt again after another revision was pushed: nothing of the old one's pages is found."""
    ids = prompt(31, 100)
    for target in ("all8", "qv3"):
        directory = shutil.copytree(tiny.adapters[target], tmp_path / target)
        revision = await publish(client, directory, "reloaded")
        expected = tiny.greedy(target, ids, 6)
        for cached in (0, 96):
            stream = await read(client, ids, adapter="reloaded", max_tokens=6)
            assert stream.accepted is not None and stream.accepted.adapter.revision == revision
            assert (stream.token_ids, stream.accepted.cached_tokens) == (expected, cached)


# Adapters that are refused --------------------------------------------------------------------------------------------


async def test_a_rank_beyond_what_the_bank_takes(client: AsyncClient, tiny: TinyModel, tmp_path: Path) -> None:
    """KER-07: r = 4 first, then 12, then one too large: refused whole, and the others go on."""
    ids = prompt(40, 10)
    await publish(client, adapter_files.write(tmp_path / "large", {Q_PROJ.format(layer=0): (64, 64)}, rank=32), "large")
    for target in ("q4", "mlp12"):
        assert (await read(client, ids, adapter=target, max_tokens=4)).token_ids == tiny.greedy(target, ids, 4)
    error = await refusal(client, ids, adapter="large", max_tokens=4)
    assert error.code is grpc.StatusCode.FAILED_PRECONDITION
    assert f"rank 32, this server takes at most {BANK_ROWS}" in error.message
    assert (await read(client, ids, adapter="q4", max_tokens=4)).token_ids == tiny.greedy("q4", ids, 4)


async def test_adapters_that_bring_a_head(client: AsyncClient, tiny: TinyModel, tmp_path: Path) -> None:
    """KER-17: a whole head is refused by the store, low-rank changes to it by the server. Neither falls back to the base."""
    model = AutoModelForCausalLM.from_pretrained(tiny.directory)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["lm_head"])
    get_peft_model(model, config).save_pretrained(tmp_path / "whole")
    for name in ("head-a", "head-b"):
        with pytest.raises(ServiceError) as caught:
            await client.adapters.push(tmp_path / "whole", name)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.field == "adapter_config.json/modules_to_save"
        shapes = {"lm_head": (64, VOCAB), Q_PROJ.format(layer=0): (64, 64)}
        await publish(client, adapter_files.write(tmp_path / name, shapes, rank=3 + len(name)), f"low-rank-{name}")
    refusals = [refusal(client, [7, 8], adapter=f"low-rank-{name}", max_tokens=4) for name in ("head-a", "head-b")]
    for error in await asyncio.gather(*refusals):
        assert error.code is grpc.StatusCode.FAILED_PRECONDITION and "lm_head" in error.message


# Limits ---------------------------------------------------------------------------------------------------------------


async def test_the_limit_told_is_the_limit_held(client: AsyncClient, tiny: TinyModel) -> None:
    """LIM-07: what the memory cannot hold is refused at once, though the model could."""
    assert (await client.models()).context_length == CONTEXT
    for num_prompt, max_tokens, field in (
        (CONTEXT + 44, 4, "prompt.token_ids"),
        (CONTEXT, 1, "prompt.token_ids"),
        (CONTEXT - 10, 11, "sampling.max_tokens"),
    ):
        error = await refusal(client, prompt(32, num_prompt), max_tokens=max_tokens)
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    ids = prompt(32, CONTEXT - 10)
    assert (await read(client, ids, max_tokens=10)).token_ids == tiny.greedy(None, ids, 10)
    # Two of them cannot run together: one after the other they do.
    both = await asyncio.gather(*(read(client, prompt(seed, CONTEXT - 10), max_tokens=10) for seed in (33, 34)))
    assert [stream.token_ids for stream in both] == [tiny.greedy(None, prompt(s, CONTEXT - 10), 10) for s in (33, 34)]


@pytest.mark.parametrize("nothing", ["", [], "ÄÖÜ"], ids=["text", "ids", "text of no tokens"])
async def test_a_prompt_of_no_tokens(client: AsyncClient, tiny: TinyModel, nothing: Any) -> None:
    """LIM-01: there is no BOS to start from. Refused, and the next one is answered."""
    error = await refusal(client, nothing, max_tokens=4)
    field = "prompt.token_ids" if nothing == [] else "prompt.text"
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert (await read(client, [7, 8], max_tokens=2)).token_ids == tiny.greedy(None, [7, 8], 2)


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
async def test_so_many_tokens_unary_and_streamed(
    stack: Stack, client: AsyncClient, tiny: TinyModel, max_tokens: int
) -> None:
    """LIM-03, LIM-09: with stop strings set, too."""
    ids = prompt(35, 9)
    expected = tiny.greedy("q4", ids, max_tokens)
    sampling: requests.Sampling = {"max_tokens": max_tokens, "ignore_eos": True, "stop": ["never said"]}
    stream = await read(client, ids, adapter="q4", **sampling)
    request = requests.generate_request(
        ids, adapter="q4", revision=None, alias=None, priority="normal", sampling=sampling
    )
    async with serving.channel(stack.gateway) as channel:
        call: Any = gateway_pb2_grpc.GenerationStub(channel).GenerateUnary(request)
        response: gateway_pb2.GenerateResponse = await call
    assert stream.token_ids == list(response.choices[0].token_ids) == expected
    assert stream.finished is not None
    assert stream.finished.reason == response.finished.reason == common_pb2.FINISH_REASON_LENGTH


async def test_ids_past_the_tokenizer(client: AsyncClient) -> None:
    """TXT-17: given and sampled, they have no text; stop strings are found around them."""
    ids = [PADDED, *prompt(36, 8), VOCAB - 1]
    stream = await read(client, ids, max_tokens=3, echo=True, logprobs=2, prompt_logprobs=1, logit_bias={PADDED: 100.0})
    assert (stream.token_ids, stream.text) == ([PADDED] * 3, "")
    assert stream.prompt is not None and list(stream.prompt.token_ids) == ids
    said = [WORDS.index("a"), WORDS.index("b"), PADDED]
    arguments: dict[str, Any] = {"logit_bias": dict.fromkeys(said, 90.0), "frequency_penalty": 2.0, "max_tokens": 30}
    free = await read(client, ids, **arguments)
    assert set(free.token_ids) == set(said)
    assert free.text == "".join(WORDS[token] for token in free.token_ids if token != PADDED)
    stopped = await read(client, ids, **arguments, stop=[free.text[3:7]])
    assert stopped.text == free.text[: free.text.index(free.text[3:7])]


# Cancels --------------------------------------------------------------------------------------------------------------


async def test_an_id_used_again_at_once_after_its_cancel(client: AsyncClient, tiny: TinyModel) -> None:
    """SCH-13: a cancel on its way never hits the next request of the same id."""
    ids = prompt(37, 12)
    expected = tiny.greedy("qv3", ids, 4)
    for turn in range(100):
        first = client.generate(ids, adapter="qv3", request_id="same", max_tokens=200, ignore_eos=True)
        if turn % 4:
            await anext(aiter(first))
        first.cancel()
        again = await read(client, ids, adapter="qv3", request_id="same", max_tokens=4)
        assert again.accepted is not None and again.accepted.request_id == "same"
        assert again.token_ids == expected, turn
