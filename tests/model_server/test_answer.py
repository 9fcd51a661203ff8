"""One answer from the engine's tokens to the wire: text, stop strings and counts together, on tokens written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import grpc
import pytest
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from kernels.cpu.ops import CpuOps
from model_server import messages
from model_server.answer import Answer
from model_server.request import Finish
from model_server.runner import Sampled
from model_server.tokenizer import Tokenizer
from model_server.weights.huggingface import HuggingFaceDirectory
from protos import common_pb2
from protos.errors import ServiceError
from tests.model_server.fake_engine import ended
from tests.model_server.local_engine import LocalEngine
from tests.model_server.tiny import VOCAB, TinyModel

WORDS = ["<s>", "</s>", "DEF", "G", "HI", "J", "ple", "as", "four,", "Ġfive", ",", "Ġsix", "ä", "¸"]
BOS, EOS, DEF, G, HI, J, PLE, AS, FOUR, FIVE, COMMA, SIX, BYTE1, BYTE2 = range(len(WORDS))
LENGTH = common_pb2.FINISH_REASON_LENGTH
STOP = common_pb2.FINISH_REASON_STOP
EOS_REASON = common_pb2.FINISH_REASON_EOS


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = Backend(BPE(vocab={word: index for index, word in enumerate(WORDS)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(word, normalized=False) for word in WORDS[:2]])
    return Tokenizer(backend, {})


def run(
    tokenizer: Tokenizer, pushes: Sequence[Sequence[int]], finish: Finish, stop: Sequence[str] = ()
) -> tuple[list[str], common_pb2.ChoiceEnd]:
    """The texts sent, and how the choice ended, when the engine's tokens come in these groups."""
    answer, index = Answer(0, tokenizer, stop, 0), 0
    sent: list[str] = []
    for group in pushes:
        delta = answer.take(messages.Tokens(1, index, [Sampled(token, -1.0, ((token, -1.0),)) for token in group]))
        # A position for each token of the delta, however many came at once.
        assert [position.top[0].token_id for position in delta.logprobs] == list(delta.token_ids)
        sent.append(delta.text)
        index += len(group)
        if answer.stopped:
            break
    rest = answer.end(ended(1, finish, index))
    return [*sent, rest.text if rest is not None else ""], answer.choice_end()


@pytest.mark.parametrize("pushes", [[[DEF], [G], [HI], [J]], [[DEF, G], [HI, J]], [[DEF, G, HI, J]]])
def test_nothing_of_the_stop_string_is_sent(tokenizer: Tokenizer, pushes: list[list[int]]) -> None:
    """TXT-11."""
    sent, end = run(tokenizer, pushes, Finish.LENGTH, ["DEFGHIJ"])
    assert "".join(sent) == "" and end.stop == "DEFGHIJ" and end.output_tokens == 4


@pytest.mark.parametrize("finish", [Finish.LENGTH, Finish.CANCELLED])
def test_what_the_buffers_hold_after_a_stop_is_dropped(tokenizer: Tokenizer, finish: Finish) -> None:
    """TXT-13: text behind the match in the same delta, and a character half there when it came."""
    for last in ([FIVE, SIX], [FIVE, BYTE1], [FIVE, COMMA, SIX, BYTE1]):
        sent, end = run(tokenizer, [[FOUR], last], finish, ["five"])
        assert "".join(sent) == "four, " and end.reason == STOP and end.output_tokens == 2
    # The held byte comes before the match: then it is text, where the whole decode has it.
    sent, _ = run(tokenizer, [[FOUR, BYTE1], [FIVE]], finish, ["five"])
    assert "".join(sent) == "four,\ufffd "


def test_a_held_beginning_is_delivered_when_the_answer_ends(tokenizer: Tokenizer) -> None:
    """TXT-15: at the end of sequence and at the limit; with half a character behind it, too."""
    for finish, reason in ((Finish.EOS, EOS_REASON), (Finish.LENGTH, LENGTH)):
        last = [EOS] if finish is Finish.EOS else []
        sent, end = run(tokenizer, [[PLE], [AS, *last]], finish, ["assistant"])
        assert sent == ["ple", "", "as"] and end.reason == reason
        sent, _ = run(tokenizer, [[PLE], [AS, BYTE1, *last]], finish, ["as\ufffdx"])
        assert "".join(sent) == "pleas\ufffd"


def test_ids_past_the_tokenizer(tokenizer: Tokenizer, tiny: TinyModel, files: HuggingFaceDirectory) -> None:
    """TXT-17: the model's vocabulary is padded past the tokenizer's. Such an id is sampled, given back, scored and read as
    part of a prompt like any other; it has no text, and stop strings are found around it."""
    padded = tokenizer.vocab_size + 3
    assert tokenizer.vocab_size == len(WORDS) and padded < VOCAB
    local = LocalEngine(files, CpuOps(), tiny.adapters, max_running=4)
    prompt = [*(Random(1).randrange(VOCAB) for _ in range(20)), padded, VOCAB - 1]
    penalised: dict[str, Any] = {"frequency_penalty": 2.0, "repetition_penalty": 1.3, "logprobs": 3}
    only = local.submit(prompt, 3, "all8", logit_bias=((padded, 100.0),), **penalised)
    among = local.submit(prompt, 40, None, logit_bias=tuple((token, 90.0) for token in (G, HI, padded)), **penalised)
    stopping = local.submit(
        prompt, 9, ignore_eos=False, stop_token_ids=frozenset({padded}), logit_bias=((padded, 100.0),)
    )
    local.run()
    assert local.tokens[only] == [padded] * 3 and local.tokens[stopping] == [padded]
    assert (local.ended[stopping].finish, local.ended[stopping].stop_token_id) == (Finish.STOP, padded)
    sent, end = run(tokenizer, [[token] for token in local.tokens[only]], Finish.LENGTH)
    assert "".join(sent) == "" and end.output_tokens == 3

    said = local.tokens[among]
    assert set(said) == {G, HI, padded}
    text = tokenizer.decode(said)
    assert text and set(text) == set("GHI")
    sent, _ = run(tokenizer, [[token] for token in said], Finish.LENGTH)
    assert "".join(sent) == text
    # A token without text within the stop string.
    at = next(i for i in range(len(said) - 2) if said[i + 1] == padded and padded not in (said[i], said[i + 2]))
    stop = tokenizer.decode(said[at : at + 3])
    sent, end = run(tokenizer, [[token] for token in said], Finish.LENGTH, [stop])
    assert "".join(sent) == text[: text.index(stop)] and end.stop == stop


def test_an_answer_with_a_hole_in_it_is_none(tokenizer: Tokenizer) -> None:
    """Whether a later token shows it, or the engine's count."""
    for last_index, last in ((2, None), (None, ended(1, Finish.LENGTH, 2)), (0, None)):
        answer = Answer(0, tokenizer, (), 0)
        answer.take(messages.Tokens(1, 0, [Sampled(G)]))
        with pytest.raises(ServiceError) as caught:
            if last is not None:
                answer.end(last)
            else:
                answer.take(messages.Tokens(1, last_index, [Sampled(HI)]))
        assert caught.value.code is grpc.StatusCode.INTERNAL
