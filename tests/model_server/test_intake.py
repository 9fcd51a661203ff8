"""From the wire to the engine, where tokenizer and context length decide."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, processors
from tokenizers.models import BPE

from model_server.intake import Intake
from model_server.runner import RunnerInfo
from model_server.tokenizer import Tokenizer
from protos import common_pb2, model_server_pb2
from protos.errors import ServiceError

CONTEXT = 16
NOTHING = {
    "no text": common_pb2.Prompt(text=""),
    "no ids": common_pb2.Prompt(token_ids=common_pb2.TokenIds()),
    "no letter it knows": common_pb2.Prompt(text="é"),
}


def intake(begins: bool) -> Intake:
    """For letters, and nothing else; `begins`: with a BOS token in front."""
    backend = Backend(BPE(vocab={word: index for index, word in enumerate(["<s>", *"abcdefgh"])}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    if begins:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    info = RunnerInfo("tiny", 1, CONTEXT, 0, 0, {}, 1, 1, context_length=CONTEXT, vocab_size=12, eos_token_ids=())
    return Intake(Tokenizer(backend, {}), info, default_max_tokens=100)


def request(prompt: common_pb2.Prompt, **sampling: Any) -> model_server_pb2.ServerGenerateRequest:
    return model_server_pb2.ServerGenerateRequest(prompt=prompt, sampling=common_pb2.SamplingParams(**sampling))


@pytest.mark.parametrize("prompt", NOTHING)
@pytest.mark.parametrize("begins", [False, True], ids=["without BOS", "with BOS"])
async def test_a_prompt_of_no_tokens(begins: bool, prompt: str) -> None:
    """LIM-01: an empty one is refused either way; one that only becomes empty starts from BOS where there is one."""
    if begins and prompt == "no letter it knows":
        assert (await intake(begins).parse(request(NOTHING[prompt]))).prompt_ids == [0]
        return
    with pytest.raises(ServiceError) as caught:
        await intake(begins).parse(request(NOTHING[prompt]))
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.field == ("prompt.token_ids" if prompt == "no ids" else "prompt.text")


@pytest.mark.parametrize("begins", [False, True], ids=["without BOS", "with BOS"])
async def test_prompt_and_output_fill_the_context_and_no_more(begins: bool) -> None:
    """LIM-07: the tokens around a text count too."""
    text = "a" * (CONTEXT - 3)
    room = 3 - begins
    for max_tokens in (1, room):
        prompt = common_pb2.Prompt(text=text)
        assert (await intake(begins).parse(request(prompt, max_tokens=max_tokens))).sampling.max_tokens == max_tokens
    assert (await intake(begins).parse(request(common_pb2.Prompt(text=text)))).sampling.max_tokens == room
    with pytest.raises(ServiceError) as caught:
        await intake(begins).parse(request(common_pb2.Prompt(text=text), max_tokens=room + 1))
    assert caught.value.field == "sampling.max_tokens"
    with pytest.raises(ServiceError) as caught:
        await intake(begins).parse(request(common_pb2.Prompt(text="a" * (CONTEXT - begins)), max_tokens=1))
    assert caught.value.field == "prompt.text"
