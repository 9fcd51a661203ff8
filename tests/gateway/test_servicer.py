"""The front door over real connections: what is forwarded, refused and found."""

import math
import tracemalloc

import grpc
import pytest

from protos import adapter_store_pb2 as store_pb
from protos import common_pb2 as pb
from protos import errors, gateway_pb2
from tests.gateway.peers import answers, ask, refuses, until


async def refusal(call):
    """The typed error that `call` ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read() if hasattr(call, "read") else await call
    return errors.from_rpc_error(raised.value)


async def test_stream_is_forwarded_with_the_revision_pinned(start_world):
    world = await start_world(answers(3))
    revision = await world.store.put("alpha", alias="prod")
    await until(lambda: len(world.gateway.catalog))
    call = world.stub.Generate(
        ask("alpha", alias="prod", temperature=0.5, seed=7, priority=pb.PRIORITY_HIGH),
        metadata=(("x-request-id", "r-1"),),
        timeout=10,
    )
    events = [event async for event in call]
    assert [event.WhichOneof("event") for event in events] == ["accepted", "delta", "delta", "delta", "finished"]
    first, last = events[0].accepted, events[-1].finished
    assert (first.request_id, first.adapter.adapter_id, first.adapter.revision) == ("r-1", "alpha", revision)
    assert first.replica == world.server.address
    assert 0 < first.queue_s < 1 and last.timings.gateway_queue_s == first.queue_s
    assert last.timings.prefill_s == 0.5
    asked = world.server.requests[0]
    assert asked.adapter == pb.AdapterRef(adapter_id="alpha", revision=revision)
    assert (asked.request_id, asked.tenant, asked.priority) == ("r-1", "anonymous", pb.PRIORITY_HIGH)
    assert (asked.prompt.text, asked.sampling.temperature, asked.sampling.seed) == ("hello", 0.5, 7)
    assert asked.gateway_queue_s == first.queue_s
    assert 9 < world.server.remaining_s[0] < 10
    assert world.server.metadata[0]["x-request-id"] == "r-1"
    await world.idle()
    assert world.server.ended == ["done"]  # no abort after a normal end


async def test_unary_gives_the_same_in_one_message(start_world):
    world = await start_world(answers(3))
    response = await world.stub.GenerateUnary(ask())
    assert (response.choices[0].text, list(response.choices[0].token_ids)) == ("xxx", [0, 1, 2])
    assert not response.accepted.HasField("adapter") and response.accepted.base_model == "tiny"
    assert response.finished.usage.output_tokens == 3
    assert not world.server.requests[0].HasField("adapter")
    await world.idle()


@pytest.mark.parametrize("name", ["alphaa", "", " alpha", "Alpha", "alpha "])
async def test_a_misspelt_adapter_is_never_answered(start_world, name):  # LIF-17
    world = await start_world(answers())
    await world.store.put("alpha")
    await until(lambda: len(world.gateway.catalog))
    error = await refusal(world.stub.Generate(ask(name)))
    assert error.code is grpc.StatusCode.NOT_FOUND
    assert error.details[0].resource_type == "adapter" and error.details[0].resource_name == name
    assert ("did you mean 'alpha'" in error.message) == bool(name)
    assert world.server.requests == []


async def test_unknown_revision_and_alias_are_named(start_world):
    world = await start_world(answers())
    await world.store.put("alpha", alias="prod")
    await until(lambda: len(world.gateway.catalog))
    for version, kind in (
        ({"revision": "sha256:0"}, "revision"),
        ({"alias": "prd"}, "alias"),
        ({"alias": ""}, "alias"),
    ):
        error = await refusal(world.stub.Generate(ask("alpha", **version)))
        assert error.code is grpc.StatusCode.NOT_FOUND
        assert error.details[0].resource_type == kind and error.details[0].resource_name == next(iter(version.values()))


async def test_an_alias_moves_and_a_deletion_is_seen(start_world):
    world = await start_world(answers())
    old = await world.store.put("alpha", seed=1, alias="prod")
    new = await world.store.put("alpha", seed=2)
    await until(lambda: len(world.gateway.catalog) and len(dict(world.gateway.catalog)["alpha"].created) == 2)

    async def served(**version):
        return (await world.stub.GenerateUnary(ask("alpha", **version))).accepted.adapter.revision

    assert (await served(alias="prod"), await served(), await served(revision=old)) == (old, new, old)
    await world.store.call("SetAlias", store_pb.SetAliasRequest(adapter_id="alpha", alias="prod", revision=new))
    await until(lambda: dict(world.gateway.catalog)["alpha"].aliases["prod"] == new)
    assert await served(alias="prod") == new
    await world.store.call("Delete", store_pb.DeleteRequest(adapter_id="alpha"))
    await until(lambda: not len(world.gateway.catalog))
    assert (await refusal(world.stub.Generate(ask("alpha")))).code is grpc.StatusCode.NOT_FOUND


BAD = [
    (ask(text=""), "prompt.text"),
    (ask(text="x" * (1024 * 1024 + 1)), "prompt.text"),
    (gateway_pb2.GenerateRequest(prompt=pb.Prompt(text="x")), "target"),
    (gateway_pb2.GenerateRequest(target=pb.Target(base=pb.Target.Base())), "prompt"),
    (ask(max_tokens=0), "sampling.max_tokens"),
    (ask(max_tokens=-1), "sampling.max_tokens"),
    (ask(temperature=math.nan), "sampling.temperature"),
    (ask(temperature=math.inf), "sampling.temperature"),
    (ask(temperature=-0.1), "sampling.temperature"),
    (ask(top_p=0), "sampling.top_p"),
    (ask(top_p=1.5), "sampling.top_p"),
    (ask(top_k=-1), "sampling.top_k"),
    (ask(min_p=1.1), "sampling.min_p"),
    (ask(repetition_penalty=0), "sampling.repetition_penalty"),
    (ask(presence_penalty=-2.1), "sampling.presence_penalty"),
    (ask(frequency_penalty=math.nan), "sampling.frequency_penalty"),
    (ask(logit_bias={5: 101.0}), "sampling.logit_bias[5]"),
    (ask(stop=["a", ""]), "sampling.stop[1]"),
    (ask(stop=["a"] * 17), "sampling.stop"),
    (ask(min_tokens=-1), "sampling.min_tokens"),
    (ask(min_tokens=5, max_tokens=4), "sampling.min_tokens"),
    (ask(logprobs=21), "sampling.logprobs"),
    (ask(logprobs=-1), "sampling.logprobs"),
    (ask(logit_bias=dict.fromkeys(range(1025), 1.0)), "sampling.logit_bias"),
    (ask(stop_token_ids=[5] * 1025), "sampling.stop_token_ids"),
    (ask(priority=9), "priority"),
]


def prompts():
    for prompt, field in (
        (pb.Prompt(token_ids=pb.TokenIds()), "prompt.token_ids"),
        (pb.Prompt(chat=pb.ChatMessages()), "prompt.chat"),
        (pb.Prompt(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="wizard")])), "prompt.chat.messages[0].role"),
        (pb.Prompt(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user")] * 1025)), "prompt.chat"),
        (
            pb.Prompt(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="é" * 600_000)])),
            "prompt.chat",
        ),
        # Whatever carries the bytes.
        (pb.Prompt(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="x" * 1_100_000)])), "prompt.chat"),
    ):
        request = ask()
        request.prompt.CopyFrom(prompt)
        yield request, field


async def test_every_bad_field_is_named_and_the_server_lives(start_world):
    world = await start_world(answers())
    for request, field in [*BAD, *prompts()]:
        for call in (world.stub.Generate(request), world.stub.GenerateUnary(request)):
            error = await refusal(call)
            assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert world.server.requests == []
    assert (await world.stub.GenerateUnary(ask(top_p=1, temperature=0, logprobs=0))).choices[0].text == "xxxx"


async def test_logprobs_that_may_not_fit_into_one_message_are_refused_before_any_work(start_world):
    world = await start_world(answers())
    await world.server.set_status(context_length=1_000_000)
    await until(lambda: world.gateway.replicas.context_length == 1_000_000)
    too_many = ask(max_tokens=4096, logprobs=20, n=16), ask(max_tokens=100_000, logprobs=2), ask(logprobs=20, n=4)
    for request in too_many:
        error = await refusal(world.stub.GenerateUnary(request))
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "sampling.logprobs")
    assert world.server.requests == []
    for request in (ask(max_tokens=512, logprobs=20, n=16), ask(max_tokens=100_000), ask(logprobs=20)):
        assert (await world.stub.GenerateUnary(request)).choices[0].text
    assert (await world.stub.Generate(too_many[0]).read()).HasField("accepted"), "streams have no such limit"
    await world.server.set_status(context_length=512)
    await until(lambda: world.gateway.replicas.context_length == 512)
    assert (await world.stub.GenerateUnary(too_many[0])).choices[0].text, "the context ends before"


async def test_prompt_and_output_share_one_message(start_world):
    world = await start_world(answers())
    await world.server.set_status(context_length=8192)
    await until(lambda: world.gateway.replicas.context_length == 8192)

    def scored(num_prompt, **sampling):
        request = ask(**sampling)
        request.prompt.token_ids.ids.extend([5] * num_prompt)
        return request

    too_large = [
        (scored(7400, prompt_logprobs=20, max_tokens=780, n=16, logprobs=20), "sampling.logprobs"),
        (scored(8100, prompt_logprobs=20, max_tokens=480, n=16, logprobs=20), "sampling.prompt_logprobs"),
        # A text may have as many tokens as bytes.
        (ask(text="x" * 7400, prompt_logprobs=20, max_tokens=780, n=16, logprobs=20), "sampling.logprobs"),
        (ask(text="x" * 1_000_000, echo=True, max_tokens=750, n=16, logprobs=20), "sampling.logprobs"),
    ]
    for request, field in too_large:
        error = await refusal(world.stub.GenerateUnary(request))
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert world.server.requests == []
    assert (await world.stub.Generate(too_large[0][0]).read()).HasField("accepted"), "streams have no such limit"
    for request in (
        scored(7400, prompt_logprobs=20, max_tokens=780, logprobs=20),
        scored(100, prompt_logprobs=20, max_tokens=780, n=16, logprobs=20),
        ask(text="x" * 1_000_000, echo=True, max_tokens=780, n=16),
    ):
        assert (await world.stub.GenerateUnary(request)).choices[0].text


async def test_output_alone_that_may_not_fit_into_one_message_is_refused(start_world):
    world = await start_world(answers())
    await world.server.set_status(context_length=131_072)
    await until(lambda: world.gateway.replicas.context_length == 131_072)
    error = await refusal(world.stub.GenerateUnary(ask(max_tokens=100_000, n=16)))
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "sampling.max_tokens")
    assert (await world.stub.GenerateUnary(ask(n=16))).choices[0].text


async def test_choices_are_not_made_before_it_is_checked_how_many(start_world):
    world = await start_world(answers(), api_keys={"k": "a"})
    for metadata, code in (((), "UNAUTHENTICATED"), ((("authorization", "Bearer k"),), "INVALID_ARGUMENT")):
        tracemalloc.start()
        try:
            error = await refusal(world.stub.GenerateUnary(ask(n=500_000), metadata=metadata))
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert error.code.name == code
        assert peak_bytes < 5_000_000, "a list each would be more than 30 MB"
    assert error.field == "sampling.n"


async def test_a_message_over_the_transport_limit_is_refused(start_world):
    world = await start_world(answers())
    error = await refusal(world.stub.GenerateUnary(ask(text="x" * (5 * 1024 * 1024))))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await world.stub.GenerateUnary(ask())).choices[0].text


async def test_the_api_key_names_the_tenant(start_world):
    world = await start_world(answers(), api_keys={"k-1": "team-a"})

    def unary(**extra):
        return world.stub.GenerateUnary(ask(), **extra)

    wrong = [None, (("authorization", "Bearer k-2"),), (("authorization", "k-1"),), (("authorization", "Bearer "),)]
    for metadata in wrong:
        error = await refusal(unary(metadata=metadata))
        assert error.code is grpc.StatusCode.UNAUTHENTICATED and "k-2" not in error.message
    # Who is not known learns nothing about the request or the catalog.
    assert (await refusal(world.stub.Generate(ask("nobody", top_p=9)))).code is grpc.StatusCode.UNAUTHENTICATED
    assert (await refusal(world.stub.ListModels(gateway_pb2.ListModelsRequest()))).code.name == "UNAUTHENTICATED"
    await unary(metadata=(("authorization", "bearer k-1"),))
    assert world.server.requests[0].tenant == "team-a"


async def test_a_model_servers_typed_error_passes_unchanged(start_world):
    told = errors.invalid_argument("sampling.stop_token_ids[0]", "is 70000, the vocabulary has 512 tokens")
    world = await start_world(refuses(told))
    error = await refusal(world.stub.Generate(ask()))
    assert (error.code, error.message, error.details) == (told.code, told.message, told.details)
    assert len(world.server.requests) == 1


async def test_list_models(start_world):
    world = await start_world(answers(), answers())
    revision = await world.store.put("alpha", alias="prod")
    await world.server.set_status(resident_adapters=[pb.AdapterRef(adapter_id="alpha", revision=revision)])
    await until(lambda: len(world.gateway.catalog) and world.loads()[world.server.address].resident)
    models = await world.stub.ListModels(gateway_pb2.ListModelsRequest())
    assert (models.base_model, models.context_length) == ("tiny", 512)
    adapter = models.adapters[0]
    assert (adapter.adapter_id, adapter.newest_revision, dict(adapter.aliases), adapter.revisions) == (
        "alpha", revision, {"prod": revision}, 1,
    )  # fmt: skip
    assert [replica.ready for replica in models.replicas] == [True, True]
    assert models.replicas[0].resident_adapters[0].revision == revision
