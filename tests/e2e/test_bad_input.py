"""What must be refused is refused with a typed error that names the field, and the next request is answered as before."""

from __future__ import annotations

import asyncio
import math
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from loramux.aio import AsyncClient
from loramux.launcher import Stack
from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from protos.adapter_format import CONFIG_FILE, TENSORS_FILE
from protos.errors import ServiceError, from_rpc_error
from tests.e2e import adapter_files
from tests.e2e.adapter_files import HIDDEN, Q_PROJ, publish

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
REFUSED = grpc.StatusCode.FAILED_PRECONDITION
VOCABULARY = 49152

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(autouse=True)
async def alive_and_right(client: AsyncClient) -> AsyncIterator[None]:
    yield
    assert "Paris" in await client.generate(QUESTION, max_tokens=8).read()


async def refusal(client: AsyncClient, prompt: Any = "Hello", **arguments: Any) -> ServiceError:
    arguments = {"max_tokens": 4} | arguments
    stream = client.generate(prompt, **arguments)
    with pytest.raises(ServiceError) as caught:
        await stream.read()
    assert stream.text == "" and stream.token_ids == []
    return caught.value


# Names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *(
            "alpha",
            "",
            " ",
            "base",
            "sentimen",
            "sentimentt",
            "Sentiment",
            "SENTIMENT",
            "sentıment",
            "sentiment@newest",
        ),
        *(" sentiment", "sentiment ", "sentiment\n", "sentiment\0", "sentiment/", "./sentiment", "../sentiment"),
        "x" * 9999,
    ],
    ids=lambda name: repr(name)[:20],
)
async def test_unknown_adapter_and_near_misses(client: AsyncClient, name: str) -> None:
    error = await refusal(client, adapter=name)
    assert error.code is NOT_FOUND
    info = error.detail(error_details_pb2.ResourceInfo)
    assert info is not None and info.resource_type == "adapter" and info.resource_name == name[:200]


@pytest.mark.parametrize("revision", ["", "newest", "sha256:" + "0" * 64])
async def test_unknown_revision(client: AsyncClient, revision: str) -> None:
    error = await refusal(client, adapter="sentiment", revision=revision)
    info = error.detail(error_details_pb2.ResourceInfo)
    assert error.code is NOT_FOUND and info is not None and info.resource_type == "revision"


async def test_unknown_alias(client: AsyncClient) -> None:
    error = await refusal(client, adapter="sentiment", alias="prod")
    info = error.detail(error_details_pb2.ResourceInfo)
    assert error.code is NOT_FOUND and info is not None and info.resource_type == "alias"


# Fields ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("", "prompt.text"),
        ([], "prompt.token_ids"),
        ([VOCABULARY], "prompt.token_ids.ids[0]"),
        ([1, 2**32 - 1], "prompt.token_ids.ids[1]"),
        ("word " * 9000, "prompt.text"),
        ([5] * 8192, "prompt.token_ids"),
        ([{"role": "user", "content": "word " * 9000}], "prompt.chat"),
        ([{"role": "tool", "content": "Hello"}], "prompt.chat.messages[0].role"),
        ("x" * 4_000_000, "prompt.text"),
        ([{"role": "user", "content": "x" * 4_000_000}], "prompt.chat"),
    ],
    ids=lambda value: repr(value)[:24],
)
async def test_prompt(client: AsyncClient, prompt: Any, field: str) -> None:
    """LIM-01: nothing at all; and what is too long or not in the vocabulary."""
    error = await refusal(client, prompt)
    assert (error.code, error.field) == (INVALID, field), str(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 8192),
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("top_k", -1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", math.nan),
        ("stop_token_ids", [VOCABULARY]),
        ("logit_bias", {VOCABULARY: 1.0}),
        ("min_tokens", 5),
        ("logprobs", 21),
        ("logprobs", VOCABULARY + 1),
        ("logprobs", -1),
    ],
)
async def test_sampling(client: AsyncClient, field: str, value: Any) -> None:
    """SAM-05, SAM-11: a temperature that is none, more log probabilities than there may be."""
    error = await refusal(client, **{field: value})
    assert (error.code, error.field) == (INVALID, f"sampling.{field}"), str(error)


async def test_empty_stop_string(client: AsyncClient) -> None:
    error = await refusal(client, stop=["fine", ""])
    assert (error.code, error.field) == (INVALID, "sampling.stop[1]")


async def test_bias_that_is_no_number(client: AsyncClient) -> None:
    error = await refusal(client, logit_bias={7: math.nan})
    assert (error.code, error.field) == (INVALID, "sampling.logit_bias[7]")


BASE = common_pb2.Target(base=common_pb2.Target.Base())
HELLO = common_pb2.Prompt(text="Hello")


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (gateway_pb2.GenerateRequest(prompt=HELLO), "target"),
        (gateway_pb2.GenerateRequest(target=BASE), "prompt"),
        (
            gateway_pb2.GenerateRequest(target=BASE, prompt=common_pb2.Prompt(chat=common_pb2.ChatMessages())),
            "prompt.chat",
        ),
        (gateway_pb2.GenerateRequest(target=BASE, prompt=HELLO, priority=9), "priority"),  # type: ignore[arg-type]
    ],
    ids=["no target", "no prompt", "empty chat", "no such priority"],
)
async def test_what_the_client_cannot_say(stack: Stack, request_: gateway_pb2.GenerateRequest, field: str) -> None:
    async with grpc.aio.insecure_channel(stack.gateway) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway_pb2_grpc.GenerationStub(channel).GenerateUnary(request_)  # type: ignore[misc]
    error = from_rpc_error(caught.value)
    assert (error.code, error.field) == (INVALID, field)


async def test_message_past_the_limit(stack: Stack) -> None:
    request = gateway_pb2.GenerateRequest(target=BASE, prompt=common_pb2.Prompt(text="x" * (4 * 1024 * 1024)))
    # A channel without our options, which would refuse to send it.
    async with grpc.aio.insecure_channel(stack.gateway) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway_pb2_grpc.GenerationStub(channel).GenerateUnary(request)  # type: ignore[misc]
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# Adapters the store refuses -------------------------------------------------------------------------------------------


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return adapter_files.write(tmp_path / "plain", {Q_PROJ.format(layer=0): (HIDDEN, HIDDEN)})


async def push_refusal(client: AsyncClient, directory: Path, adapter_id: str = "refused") -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await client.adapters.push(directory, adapter_id)
    assert not (await client.adapters.list(adapter_id)).revisions
    assert (await refusal(client, adapter=adapter_id)).code is NOT_FOUND
    return caught.value


async def test_adapter_without_a_config(client: AsyncClient, plain: Path) -> None:
    (plain / CONFIG_FILE).unlink()
    error = await push_refusal(client, plain)
    assert (error.code, error.field) == (INVALID, CONFIG_FILE)


async def test_adapter_as_a_pickle(client: AsyncClient, plain: Path, tmp_path: Path) -> None:
    marker = tmp_path / "executed"

    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (marker,)

    (plain / TENSORS_FILE).unlink()
    (plain / "adapter_model.bin").write_bytes(pickle.dumps(Attack()))
    error = await push_refusal(client, plain)
    assert (error.code, error.field) == (INVALID, "adapter_model.bin")
    assert not marker.exists()


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
async def test_adapter_cut_off(client: AsyncClient, plain: Path, keep: int) -> None:
    file = plain / TENSORS_FILE
    file.write_bytes(file.read_bytes()[:keep])
    error = await push_refusal(client, plain)
    assert error.code is INVALID and error.field is not None and error.field.startswith(TENSORS_FILE)


async def test_adapter_of_another_rank_than_it_says(client: AsyncClient, plain: Path) -> None:
    config = plain / CONFIG_FILE
    config.write_text(config.read_text().replace('"r": 4', '"r": 8'))
    error = await push_refusal(client, plain)
    assert (error.code, error.field) == (INVALID, f"{TENSORS_FILE}/{Q_PROJ.format(layer=0)}")


@pytest.mark.parametrize("adapter_id", ["", "base", "a b", "../up", "x" * 129])
async def test_adapter_under_a_bad_name(client: AsyncClient, plain: Path, adapter_id: str) -> None:
    with pytest.raises(ServiceError) as caught:
        await client.adapters.push(plain, adapter_id)
    assert caught.value.code is INVALID and caught.value.field == "header.adapter_id"


# Adapters only a model can refuse -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adapter_id", "module", "shape", "says"),
    [
        ("wide", Q_PROJ.format(layer=0), (64, 64), ["64 to 64", f"{HIDDEN} to {HIDDEN}"]),
        ("deep", Q_PROJ.format(layer=40), (HIDDEN, HIDDEN), ["layer 40", "30 layers"]),
        ("foreign", "transformer.h.0.attn.c_attn", (HIDDEN, 3 * HIDDEN), ["model.layers.N.self_attn.q_proj"]),
    ],
)
async def test_adapter_of_another_base(
    client: AsyncClient, tmp_path: Path, adapter_id: str, module: str, shape: tuple[int, int], says: list[str]
) -> None:
    good = Q_PROJ.format(layer=1)
    shapes = {module: shape} | ({good: (HIDDEN, HIDDEN)} if adapter_id == "deep" else {})
    await publish(client, adapter_files.write(tmp_path / adapter_id, shapes), adapter_id)
    alone = await client.generate(QUESTION, max_tokens=24, ignore_eos=True).read()

    async def beside() -> str:
        return await client.generate(QUESTION, max_tokens=24, ignore_eos=True).read()

    neighbour, *errors = await asyncio.gather(beside(), *(refusal(client, adapter=adapter_id) for _ in range(3)))
    assert neighbour == alone
    for error in errors:
        assert error.code is REFUSED
        for text in (adapter_id, module, *says):
            assert text in error.message
    # Refused once more when asked once more; never the base model's answer.
    assert (await refusal(client, adapter=adapter_id)).code is REFUSED
