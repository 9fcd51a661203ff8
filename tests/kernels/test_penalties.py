"""Penalties and bias: the reference by hand, the kernels against the reference."""

import pytest
import torch
from torch import Tensor

from kernels import penalties
from kernels.reference import sampling as reference

V = 40
Lists = list[list[int]]


def ragged(lists: Lists, device: torch.device) -> tuple[Tensor, Tensor]:
    indptr = torch.tensor([0, *map(len, lists)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return torch.tensor([i for row in lists for i in row], dtype=torch.int64).to(device), indptr.to(device)


def penalty_arguments(
    rows: list[tuple[float, float, float]], prompts: Lists, outputs: Lists, device: torch.device
) -> list[Tensor]:
    columns = [torch.tensor(c, device=device) for c in zip(*rows, strict=True)]
    return [*columns, *ragged(prompts, device), *ragged(outputs, device)]


def test_presence_and_frequency_by_hand() -> None:
    logits = torch.zeros((1, V))
    call = penalty_arguments([(1.0, 0.5, 0.25)], [[1, 2]], [[2, 3, 3]], logits.device)
    reference.apply_penalties(logits, *call)
    assert logits[0, :5].tolist() == [0.0, 0.0, -0.75, -1.0, 0.0]  # the prompt does not count


def test_the_kernels_do_what_the_reference_does(device: torch.device, generator: torch.Generator) -> None:
    """SAM-13: rows of different lengths, none, repeated tokens, ids outside the vocabulary, padding after the lists' ends."""
    rows = [(1.3, 0.0, 0.0), (1.0, 0.0, 0.0), (1.0, 0.5, 0.25), (0.8, -0.5, 1.05)]
    prompts: Lists = [[1, 2, 2, 5], [1, 2], [], [V, -1, 3] + [4] * 90]
    outputs: Lists = [[5, 7, 7], [1, 1], [9, 9, 9], []]
    call = penalty_arguments(rows, prompts, outputs, device)
    for i in (3, 5):
        call[i] = torch.cat([call[i], call[i].new_full((70,), 11)])
    logits = torch.randn((4, V + 8), generator=generator).to(device)[:, :V]
    want, plain = logits.clone(), logits[1].clone()
    reference.apply_penalties(want, *call)
    penalties.apply_penalties(logits, *call)
    torch.testing.assert_close(logits, want)
    assert torch.equal(logits[1], plain)  # a row without penalties keeps its bits, whatever its neighbours ask for


def test_bias(device: torch.device, generator: torch.Generator) -> None:
    ids, indptr = ragged([[3, V + 3, 0], [], [3]], device)
    values = torch.tensor([2.0, 5.0, float("-inf"), -1.5], device=device)
    logits = torch.randn((3, V), generator=generator).to(device)
    want, before = logits.clone(), logits.clone()
    reference.apply_bias(want, ids, values, indptr)
    penalties.apply_bias(logits, ids, values, indptr)
    assert torch.equal(logits, want)
    assert logits[0, 0] == float("-inf") and logits[0, 3] == before[0, 3] + 2 and torch.equal(logits[1], before[1])


def test_what_they_refuse(device: torch.device) -> None:
    logits = torch.zeros((2, V), device=device)
    call = penalty_arguments([(1.0, 0.0, 0.0)] * 2, [[1], [2]], [[], []], device)
    for module in (penalties, reference):
        with pytest.raises(ValueError, match="prompt_ids"):
            module.apply_penalties(logits, *call[:3], call[3].int(), *call[4:])
        with pytest.raises(ValueError, match="output_indptr"):
            module.apply_penalties(logits, *call[:6], call[6][:2])
        with pytest.raises(ValueError, match="values"):
            module.apply_bias(logits, call[3], torch.zeros(1, device=device), call[4])
