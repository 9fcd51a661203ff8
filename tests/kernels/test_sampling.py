"""Sampling: the reference against its promises, and the kernel against the reference."""

import pytest
import torch
from torch import Tensor

from kernels.reference import sampling as reference
from kernels.sampling import sample

V = 50
SAMPLERS = [sample, reference.sample]
# numpy's, of the interpreter's division by a tiny temperature
pytestmark = pytest.mark.filterwarnings("ignore:overflow", "ignore:divide by zero", "ignore:invalid value")
GREEDY = (0.0, 0, 1.0, 0.0)


def arguments(
    logits: Tensor, rows: list[tuple[float, int, float, float]], seeds: list[int], position: int = 0
) -> list[Tensor]:
    """temperature, top_k, top_p, min_p of each row."""
    columns = list(zip(*rows, strict=True))
    device = logits.device
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    parameters = [torch.tensor(c, dtype=d, device=device) for c, d in zip(columns, dtypes, strict=True)]
    positions = torch.full((len(rows),), position, dtype=torch.int32, device=device)
    return [logits, *parameters, torch.tensor(seeds, device=device), positions]


def kept_by_sorting(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The filters as they are usually written: sort, cut, renormalise. For logits without ties."""
    probabilities = torch.softmax(logits.double() / temperature, dim=0)
    order = probabilities.argsort(descending=True).tolist()
    order = [i for i in order if probabilities[i] >= min_p * probabilities.max()]
    if top_k:
        order = order[:top_k]
    mass, kept = 0.0, set()
    total = float(probabilities[order].sum())
    for i in order:
        kept.add(i)
        mass += float(probabilities[i]) / total
        if mass >= top_p:
            break
    return kept


FILTERS = [(0.7, 5, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.5, 0, 1.0, 0.1), (1.2, 20, 0.9, 0.02), (1.0, 1, 1.0, 0.0)]


@pytest.mark.parametrize("row", FILTERS)
def test_only_tokens_that_pass_all_filters_are_drawn(
    row: tuple[float, int, float, float], generator: torch.Generator
) -> None:
    logits = torch.randn(V, generator=generator) * 2
    draws = reference.sample(*arguments(logits.repeat(500, 1), [row] * 500, list(range(500))))
    assert set(draws.tolist()) <= kept_by_sorting(logits, *row)


def test_frequencies_are_the_probabilities(generator: torch.Generator) -> None:
    logits = torch.randn(8, generator=generator)
    draws = reference.sample(*arguments(logits.repeat(4000, 1), [(0.8, 0, 1.0, 0.0)] * 4000, list(range(4000))))
    expected = torch.softmax(logits / 0.8, dim=0)
    observed = torch.bincount(draws, minlength=8) / 4000
    assert ((observed - expected).abs() < 4 * (expected * (1 - expected) / 4000).sqrt()).all()


def test_the_kernel_draws_what_the_reference_draws(device: torch.device, generator: torch.Generator) -> None:
    rows = [GREEDY, (1.0, 0, 1.0, 0.0), *FILTERS]
    logits = (torch.randn((len(rows), V + 8), generator=generator) * 2).to(device)[:, :V]
    logits[:, 7] = float("-inf")
    call = arguments(logits, rows, [0, -1, 2**40, -(2**62), 5, 6, 7], position=3)
    before = logits.clone()
    assert sample(*call).tolist() == reference.sample(*call).tolist()
    assert torch.equal(logits, before)


def test_several_tiles(device: torch.device, generator: torch.Generator) -> None:
    logits = torch.randn((2, 10000), generator=generator).to(device)
    call = arguments(logits, [(1.0, 0, 1.0, 0.0), GREEDY], [1, 2])
    assert sample(*call).tolist() == reference.sample(*call).tolist()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_row_draws_the_same_alone_and_next_to_anyone(
    sampler: object, device: torch.device, generator: torch.Generator
) -> None:
    """SAM-01, SAM-15."""
    assert callable(sampler)
    rows = [(1.0, 0, 0.9, 0.0), GREEDY, (0.8, 3, 1.0, 0.0), (2.0, 0, 1.0, 0.0)]
    logits = torch.randn((4, V), generator=generator).to(device)
    call = arguments(logits, rows, [42, 1, 2, 3])
    together = sampler(*call).tolist()
    assert [int(sampler(*(a[r : r + 1] for a in call))) for r in range(4)] == together
    assert sampler(*(a.flip(0).contiguous() for a in call)).tolist() == together[::-1]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_tiny_temperatures_are_greedy(sampler: object, device: torch.device) -> None:
    """SAM-05."""
    assert callable(sampler)
    logits = torch.tensor([1.0, 3.0, 2.5, -40.0], device=device)
    temperatures = [1e-2, 1e-4, 1e-5, 1e-12, 1e-38, 1e-45, 0.0, -0.0]
    call = arguments(logits.repeat(8, 1), [(t, 0, 1.0, 0.0) for t in temperatures], list(range(8)))
    assert sampler(*call).tolist() == [1] * 8


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_greedy_ties_take_the_lowest_id_alone_and_beside_a_sampled_row(sampler: object, device: torch.device) -> None:
    """SAM-07."""
    assert callable(sampler)
    logits = torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 1.0], [float("-inf")] * 3], device=device)
    call = arguments(logits, [GREEDY, (1.0, 0, 1.0, 0.0), (1.0, 0, 0.9, 0.0)], [1, 2, 3])
    assert sampler(*call).tolist()[0] == 1
    assert sampler(*call).tolist()[2] == 0  # nothing is allowed: still an id, never a crash
    assert sampler(*(a[:1] for a in call)).tolist() == [1]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("top_k", [V, V + 1, 9_999_999])
def test_top_k_beyond_the_vocabulary_is_off(
    sampler: object, top_k: int, device: torch.device, generator: torch.Generator
) -> None:
    """SAM-09."""
    assert callable(sampler)
    logits = torch.randn((3, V), generator=generator).to(device)
    off = sampler(*arguments(logits, [(1.0, 0, 1.0, 0.0)] * 3, [1, 2, 3]))
    assert torch.equal(sampler(*arguments(logits, [(1.0, top_k, 1.0, 0.0)] * 3, [1, 2, 3])), off)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_equal_logits_stand_or_fall_together(sampler: object, device: torch.device) -> None:
    assert callable(sampler)
    logits = torch.tensor([2.0, 2.0, 2.0, 0.0], device=device).repeat(5, 1)
    for row in ((1.0, 1, 1.0, 0.0), (1.0, 0, 0.1, 0.0)):
        drawn = set(sampler(*arguments(logits, [row] * 5, list(range(5)))).tolist())
        assert drawn <= {0, 1, 2} and len(drawn) > 1


def test_seeds_and_positions_give_different_numbers() -> None:
    numbers = {reference.uniform(seed, position) for seed in (0, 1, -1, 2**40) for position in range(50)}
    assert len(numbers) == 200 and all(0 <= u < 1 for u in numbers)


def test_known_answer_of_philox() -> None:
    """Random123's published vector for key 0, counter 0: first word 6627e8d5."""
    assert reference.uniform(0, 0) == (0x6627E8D5 >> 8) * 2.0**-24


@pytest.mark.parametrize(
    ("index", "bad", "field"),
    [
        (0, torch.zeros(2, V, dtype=torch.float16), "logits"),
        (0, torch.zeros(2, 0), "logits"),
        (1, torch.zeros(3), "temperature"),
        (2, torch.zeros(2), "top_k"),
        (3, torch.zeros(2, dtype=torch.float64), "top_p"),
        (5, torch.zeros(2, dtype=torch.int32), "seed"),
        (6, torch.zeros(2, dtype=torch.int64), "position"),
    ],
)
def test_what_it_refuses(index: int, bad: Tensor, field: str) -> None:
    call = arguments(torch.zeros(2, V), [GREEDY] * 2, [1, 2])
    call[index] = bad
    for sampler in SAMPLERS:
        with pytest.raises(ValueError, match=field):
            sampler(*call)
