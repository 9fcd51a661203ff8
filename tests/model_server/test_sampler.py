"""The sampler on logits written by hand: what a row asks for is its own affair, also where it asks for too much."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.reference import sampling as reference
from model_server.request import Request, Sampling
from model_server.sampler import Sampler

EOS = 2


def draw(rows: list[list[float]] | Tensor, *asked: dict[str, Any]) -> list[Any]:
    """What the sampler gives to requests that ask for `asked`, each on its row of logits."""
    requests = [Request(str(i), [1] * (i + 1), Sampling(max_tokens=8, **options)) for i, options in enumerate(asked)]
    return Sampler(reference, [EOS]).sample(torch.as_tensor(rows).clone(), requests)


@pytest.mark.parametrize("vocabulary", [3, 512])
def test_ties_fall_to_the_lowest_id_alone_and_beside_a_drawn_row(vocabulary: int) -> None:
    """SAM-07: greedy is no low temperature, in a batch neither. 512: searched tile by tile."""
    row = [1.0, 1.0, *[0.0] * (vocabulary - 2)]
    late = [*[0.0] * (vocabulary - 2), 1.0, 1.0]
    drawn = {"temperature": 1.0, "seed": 4}
    for options in ({}, {"logprobs": 1}, {"temperature": -0.0, "logit_bias": ((2, 0.5),)}):
        (alone,) = draw([row], options)
        together = draw([late, row, row, late], {}, drawn, options, drawn)
        assert (alone.token_id, together[2].token_id, together[0].token_id) == (0, 0, vocabulary - 2)


@pytest.mark.parametrize("temperature", [10.0**-i for i in range(2, 13)] + [1e-44, 5e-324, 0.0, -0.0])
def test_small_temperatures_are_greedy(temperature: float) -> None:
    """SAM-05."""
    (sampled,) = draw([[1.0, 3.0, 2.5, -40.0]], {"temperature": temperature, "seed": 1, "logprobs": 2})
    assert sampled.token_id == 1
    assert math.isfinite(sampled.logprob) and [token for token, _ in sampled.top] == [1, 2]


def test_more_top_logprobs_than_tokens() -> None:
    """SAM-11: as many as there are. The wire lets at most 20 through; a vocabulary may hold fewer."""
    for asked, given in ((0, 0), (1, 1), (5, 5), (6, 5), (20, 5)):
        (sampled,) = draw([[0.0, 1.0, 2.0, 3.0, 4.0]], {"logprobs": asked})
        assert [token for token, _ in sampled.top] == [4, 3, 2, 1, 0][:given]
        assert sampled.logprob == pytest.approx(4 - math.log(sum(math.exp(i) for i in range(5))), abs=1e-5)


@pytest.mark.parametrize("top_k", [8, 9, 9_999_999])
def test_top_k_of_the_whole_vocabulary_and_more(top_k: int) -> None:
    """SAM-09: as if it were off."""
    logits = torch.randn((6, 8), generator=torch.Generator().manual_seed(0))
    off = [{"temperature": 1.5, "seed": seed} for seed in range(6)]
    assert draw(logits, *(options | {"top_k": top_k} for options in off)) == draw(logits, *off)


def test_each_row_has_its_own_top_p() -> None:
    """SAM-15: one, two and three rows, whose orders and nuclei differ."""
    # 0.6, 0.3, 0.1 in another order in each row; the nuclei are of one, two and three tokens.
    rows = [[math.log(p) for p in row] for row in ((0.1, 0.6, 0.3), (0.6, 0.1, 0.3), (0.3, 0.1, 0.6))]
    nuclei = [(0.5, {1}), (0.8, {0, 2}), (0.95, {0, 1, 2})]
    said: list[set[int]] = [set(), set(), set()]
    for seed in range(60):
        asked = [{"temperature": 1.0, "top_p": top_p, "seed": seed} for top_p, _ in nuclei]
        together = [sampled.token_id for sampled in draw(rows, *asked)]
        for row, token in enumerate(together):
            said[row].add(token)
            assert draw([rows[row]], asked[row])[0].token_id == token
        assert [sampled.token_id for sampled in draw(rows[1:], *asked[1:])] == together[1:]
    assert said == [nucleus for _, nucleus in nuclei]


def test_a_row_that_asks_for_everything_changes_no_other() -> None:
    """SAM-13, SAM-17: bias, penalties over prompts of other lengths, a ban on ending, log probabilities."""
    logits = torch.randn((4, 50), generator=torch.Generator().manual_seed(1)) * 2
    plain: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "top_p": 0.8, "seed": 3},
        {"temperature": 1.3, "min_p": 0.1},
    ]
    everything: dict[str, Any] = {
        "frequency_penalty": 1.05,
        "presence_penalty": 2.0,
        "repetition_penalty": 1.4,
        "min_tokens": 3,
    }
    everything |= {"logit_bias": ((5, 3.0),), "logprobs": 4, "temperature": 2.0, "top_k": 3, "seed": 8, "min_tokens": 3}
    beside = draw(logits, *plain, everything)
    assert beside[:3] == draw(logits, *plain, {})[:3]
    assert beside[:3] == [draw(logits[row : row + 1], options)[0] for row, options in enumerate(plain)]
