"""What a request is charged while it runs, and what it was expected to cost."""

from gateway.account import Account
from gateway.servicer import _expected_tokens
from observability.metrics import RequestMetrics
from protos import common_pb2 as pb
from tests.gateway.peers import ask, delta, event, finished


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
