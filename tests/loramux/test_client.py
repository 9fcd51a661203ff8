from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from loramux import Client, ServiceError
from protos import common_pb2, errors, gateway_pb2
from tests.loramux import scripted
from tests.loramux.scripted import ScriptedServer


@pytest.fixture
def client(server: ScriptedServer) -> Any:
    with Client(server.address, adapter_store=server.address) as client:
        yield client


def test_streams_deltas_between_accepted_and_finished(client: Client) -> None:
    stream = client.generate("Hi", adapter="sentiment")
    assert [delta.text for delta in stream] == ["Hel", "lo", " 🌶️"]
    assert stream.text == "Hello 🌶️" and stream.token_ids == [100, 101, 102]
    assert stream.accepted is not None and stream.accepted.adapter.revision == scripted.REVISION
    assert stream.finished is not None and stream.finished.usage.output_tokens == 3


def test_request_carries_what_was_asked(client: Client, server: ScriptedServer) -> None:
    client.generate(
        [{"role": "user", "content": "Hi"}],
        adapter="a",
        alias="prod",
        priority="high",
        timeout_s=9,
        api_key="k",
        request_id="mine",
        max_tokens=5,
        temperature=0.5,
        stop="\n",
        logit_bias={3: -1.0},
        seed=None,
    ).read()
    sent = server.generation.request
    assert sent.target.adapter == common_pb2.Target.Adapter(adapter_id="a", alias="prod")
    assert sent.prompt.chat.messages[0].content == "Hi"
    assert sent.priority == common_pb2.PRIORITY_HIGH
    assert sent.sampling == common_pb2.SamplingParams(max_tokens=5, temperature=0.5, stop=["\n"], logit_bias={3: -1.0})
    assert server.generation.metadata["authorization"] == "Bearer k"
    assert server.generation.metadata["x-request-id"] == "mine"


def test_base_is_asked_for_explicitly(client: Client, server: ScriptedServer) -> None:
    client.generate([1, 2, 3]).read()
    assert server.generation.request.target.WhichOneof("kind") == "base"
    assert list(server.generation.request.prompt.token_ids.ids) == [1, 2, 3]


def test_an_empty_adapter_name_is_not_the_base(client: Client, server: ScriptedServer) -> None:
    client.generate("Hi", adapter="").read()
    assert server.generation.request.target.WhichOneof("kind") == "adapter"


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("sampling.max_tokens", {"max_tokens": 1 << 40}),
        ("sampling.temperature", {"temperature": "hot"}),
        ("sampling.top_p2", {"top_p2": 1.0}),
        ("sampling.stop_token_ids", {"stop_token_ids": [-1]}),
        ("priority", {"priority": "urgent"}),
        ("target.adapter.version", {"adapter": "a", "alias": "x", "revision": "y"}),
        ("target.adapter.adapter_id", {"alias": "x"}),
        ("prompt.token_ids", {"prompt": [1, -5]}),
        ("prompt.token_ids", {"prompt": [1, "b"]}),
        ("prompt.text", {"prompt": "\ud800"}),
        ("prompt", {"prompt": 5}),
        ("prompt", {"prompt": b"Hello"}),
        ("prompt", {"prompt": bytearray(b"Hello")}),
        ("sampling.stop_token_ids", {"stop_token_ids": b"Hello"}),
        ("prompt.chat.messages[1]", {"prompt": [{"role": "user", "content": ""}, {"role": "user"}]}),
        ("request_id", {"request_id": "a\nb"}),
    ],
)
def test_what_the_wire_cannot_carry_is_refused_by_field(client: Client, field: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ServiceError) as caught:
        client.generate(**{"prompt": "Hi", **arguments})
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.field == field


def test_a_servers_error_arrives_typed(client: Client, server: ScriptedServer) -> None:
    async def refuse(request: gateway_pb2.GenerateRequest) -> AsyncIterator[common_pb2.GenerateEvent]:
        raise errors.invalid_argument("sampling.top_p", "must be in (0, 1]")
        yield

    server.generation.script = refuse
    with pytest.raises(ServiceError) as caught:
        client.generate("Hi").read()
    assert caught.value.field == "sampling.top_p"


def test_an_error_after_some_text_keeps_the_text(client: Client, server: ScriptedServer) -> None:
    async def lost(request: gateway_pb2.GenerateRequest) -> AsyncIterator[common_pb2.GenerateEvent]:
        yield scripted.accepted()
        yield scripted.delta(0, "so far")
        raise errors.unavailable("the replica went away")

    server.generation.script = lost
    stream = client.generate("Hi")
    with pytest.raises(ServiceError) as caught:
        stream.read()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert stream.text == "so far" and stream.finished is None


BROKEN = {
    "without Finished": [scripted.accepted(), scripted.delta(0, "x")],
    "before accepted": [scripted.delta(0, "x"), scripted.finished(1)],
    "accepted again": [scripted.accepted(), scripted.accepted()],
    "token 5 where 1 was due": [scripted.accepted(), scripted.delta(0, "x"), scripted.delta(5, "y")],
    "token 0 where 1 was due": [scripted.accepted(), scripted.delta(0, "x"), scripted.delta(0, "x")],
    "delta after finished": [scripted.accepted(), scripted.finished(0), scripted.delta(0, "x")],
    "empty event": [scripted.accepted(), common_pb2.GenerateEvent()],
}


@pytest.mark.parametrize("complaint", BROKEN)
def test_a_stream_that_breaks_its_contract_raises(client: Client, server: ScriptedServer, complaint: str) -> None:
    async def broken(request: gateway_pb2.GenerateRequest) -> AsyncIterator[common_pb2.GenerateEvent]:
        for event in BROKEN[complaint]:
            yield event

    server.generation.script = broken
    with pytest.raises(ServiceError, match=complaint) as caught:
        client.generate("Hi").read()
    assert caught.value.code is grpc.StatusCode.INTERNAL


def test_leaving_the_loop_cancels_the_call(client: Client, server: ScriptedServer) -> None:
    server.generation.script = scripted.endless
    stream = client.generate("Hi")
    for _ in stream:
        break
    assert server.generation.cut_off.wait(5)
    with pytest.raises(ServiceError) as caught:
        stream.read()
    assert caught.value.code is grpc.StatusCode.CANCELLED


def test_leaving_the_with_block_cancels_the_call(client: Client, server: ScriptedServer) -> None:
    server.generation.script = scripted.endless
    with pytest.raises(KeyError), client.generate("Hi") as stream:
        next(iter(stream))
        raise KeyError
    assert server.generation.cut_off.wait(5)


def test_dropping_the_stream_unread_cancels_the_call(client: Client, server: ScriptedServer) -> None:
    server.generation.script = scripted.endless
    stream = client.generate("Hi")
    next(iter(stream))  # the server has it
    del stream
    assert server.generation.cut_off.wait(5)


def test_the_deadline_ends_the_stream(client: Client, server: ScriptedServer) -> None:
    server.generation.script = scripted.endless
    with pytest.raises(ServiceError) as caught:
        client.generate("Hi", timeout_s=0.1).read()
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert server.generation.cut_off.wait(5)


def test_nobody_there_is_unavailable() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(ServiceError) as caught:
        client.generate("Hi").read()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE


def test_models(client: Client) -> None:
    assert client.models().adapters[0].adapter_id == "sentiment"


def test_push_sends_the_adapters_files_in_chunks(client: Client, server: ScriptedServer, adapter_dir: Path) -> None:
    seen: list[tuple[int, int]] = []
    answer = client.adapters.push(adapter_dir, "mine", alias="prod", progress=lambda *at: seen.append(at))
    config = (adapter_dir / "adapter_config.json").read_bytes()
    weights = (adapter_dir / "adapter_model.safetensors").read_bytes()
    assert answer.created and answer.revision.ref.adapter_id == "mine"
    assert server.store.header.alias == "prod"
    assert [(f.name, f.size) for f in server.store.header.files] == [
        ("adapter_config.json", len(config)),
        ("adapter_model.safetensors", len(weights)),
    ]
    assert server.store.content == config + weights
    assert seen[-1] == (len(config + weights), len(config + weights)) and len(seen) == 3


def test_push_refused_midway_raises_the_stores_error(client: Client, server: ScriptedServer, adapter_dir: Path) -> None:
    server.store.refusal = errors.invalid_argument("adapter_id", "is the base model's name")
    with pytest.raises(ServiceError) as caught:
        client.adapters.push(adapter_dir, "tiny")
    assert caught.value.field == "adapter_id"


def test_push_of_a_pickle_lets_the_store_refuse_it(client: Client, server: ScriptedServer, adapter_dir: Path) -> None:
    (adapter_dir / "adapter_model.safetensors").rename(adapter_dir / "adapter_model.bin")
    client.adapters.push(adapter_dir, "mine")
    assert [f.name for f in server.store.header.files] == ["adapter_config.json", "adapter_model.bin"]


@pytest.mark.parametrize("name", ["missing", "."])
def test_push_of_no_adapter_names_the_directory(client: Client, tmp_path: Path, name: str) -> None:
    with pytest.raises(ServiceError) as caught:
        client.adapters.push(tmp_path / name, "mine")
    assert caught.value.field == "directory"


def test_adapter_admin(client: Client, server: ScriptedServer) -> None:
    assert client.adapters.list("sentiment").aliases[0].alias == "prod"
    client.adapters.alias("sentiment", "prod", None)
    assert client.adapters.rm("sentiment", scripted.REVISION).deleted_revisions == 1
    listed, aliased, removed = server.store.calls
    assert listed.adapter_id == "sentiment"
    assert (aliased.alias, aliased.revision) == ("prod", "")
    assert removed.revision == scripted.REVISION
