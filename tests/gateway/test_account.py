"""What a request is charged while it runs, and what it was expected to cost."""

import time

import grpc
import pytest

from gateway.account import Account
from gateway.servicer import _expected_tokens
from observability.metrics import RequestMetrics
from protos import common_pb2 as pb
from tests.gateway.peers import accepted, ask, delta, event, finished


def test_the_prompts_echo_resets_nothing():
    account = Account(RequestMetrics(), streamed=True)
    account.event(event(accepted=pb.Accepted(prompt_tokens=3)))
    account.event(event(prompt=pb.PromptEcho(token_ids=[1, 2, 3])))
    assert account.used_tokens == 3
    account.event(delta(0))
    assert account.used_tokens == 4
    account.event(finished(5))
    assert account.used_tokens == 3 + 5


def test_every_choice_is_expected_to_cost_its_output():
    prompt_tokens = _expected_tokens(ask(max_tokens=10)) - 10
    assert _expected_tokens(ask(max_tokens=10, n=4)) == prompt_tokens + 40
    assert _expected_tokens(ask(n=2)) - prompt_tokens == 2 * (_expected_tokens(ask()) - prompt_tokens)


def test_choices_side_by_side_read_no_faster_than_one(measured):
    with Account(RequestMetrics(), streamed=True) as account:
        for index in range(3):
            for choice in range(16):
                account.event(delta(index, choice=choice))
            time.sleep(0.01)
        account.event(finished(48))
    duration, first, per_token = (
        measured(f"gen_ai.server.{name}")[0].sum
        for name in ("request.duration", "time_to_first_token", "time_per_output_token")
    )
    assert per_token == pytest.approx((duration - first) / 2)


async def test_what_nobody_foresaw_is_counted_as_the_caller_is_told(start_world, measured):
    async def answers_with_a_choice_too_many(request, context):
        yield accepted(request)
        yield delta(0, choice=1)

    world = await start_world(answers_with_a_choice_too_many)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await world.stub.GenerateUnary(ask())
    assert raised.value.code() is grpc.StatusCode.INTERNAL
    assert [point.attributes["error.type"] for point in measured("gen_ai.server.request.duration")] == ["INTERNAL"]
    await world.idle()


def test_an_unforeseen_end_of_the_events_is_counted_as_internal(measured):
    with pytest.raises(RuntimeError), Account(RequestMetrics(), streamed=True):
        raise RuntimeError
    assert [point.attributes["error.type"] for point in measured("gen_ai.server.request.duration")] == ["INTERNAL"]
