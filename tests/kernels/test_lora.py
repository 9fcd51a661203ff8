"""LoRA against its definition: every mix, rank and form; base rows untouched; results that know no neighbours."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.layouts import BASE, Batch, LoraLayer, LoraTables
from kernels.lora import LoraPlan, lora, plan_lora
from kernels.reference import lora as reference
from kernels.segments import Segments, build_segments
from kernels.tolerances import worst_error
from kernels.triton_ops import TritonOps
from kernels.workloads import MIXED_RANKS, MIXES, assign, decode_batch, make_batch, make_lora_layer, mixed_ranks

K = 80
QKV = (48, 16, 16)


def chunked(batch: Batch, chunk_rows: int) -> LoraPlan:
    """The plan for chunks of `chunk_rows`, whatever plan_lora would choose."""
    device = batch.token_adapter.device
    if chunk_rows == 1:
        adapters = batch.token_adapter
        return LoraPlan(1, batch.num_tokens, adapters, adapters, adapters, adapters)
    buffers = Segments.allocate(batch.num_tokens, device)
    build_segments(batch.token_adapter, chunk_rows, buffers)
    return LoraPlan(
        chunk_rows, batch.num_tokens, buffers.order, buffers.chunk_adapter, buffers.chunk_start, buffers.chunk_len
    )


def rows_of(adapters: list[int], device: torch.device) -> Batch:
    ones = [1] * len(adapters)
    return make_batch(ones, ones, adapters, torch.Generator().manual_seed(0), device)


def random(shape: tuple[int, ...], generator: torch.Generator, like: LoraLayer) -> Tensor:
    return torch.randn(shape, generator=generator).to(like.a)


def check_lora(batch: Batch, layer: LoraLayer, plan: LoraPlan | None, generator: torch.Generator) -> None:
    """Against the reference; base rows of x are NaN, so reading one shows, and their y must keep its bits."""
    x = random((batch.num_tokens, layer.a.shape[2]), generator, layer)
    y = random((batch.num_tokens, layer.b.shape[1]), generator, layer)
    base = batch.token_adapter == BASE
    x[base] = float("nan")
    want, before = y.float(), y.clone()
    reference.lora(want, x, layer, batch.token_adapter)
    if plan is not None:
        lora(y, x, layer, plan)
    assert worst_error(y, want) <= 1
    assert torch.equal(y[base], before[base])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("mix", MIXES)
def test_prefill_and_decode_together(
    mix: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    adapters = assign(mix, 7, generator)
    batch = make_batch([5, 1, 19, 1, 2, 1, 1], [5, 9, 19, 33, 2, 16, 17], adapters, generator, device, padding_rows=2)
    layer = make_lora_layer(mixed_ranks(7, 3, generator), K, QKV, generator, dtype, device)
    check_lora(batch, layer, plan_lora(batch, Segments.allocate(64, device)), generator)


@pytest.mark.parametrize("mix", MIXES)
def test_decode(mix: str, device: torch.device, generator: torch.Generator) -> None:
    batch = decode_batch(mix, 7, generator, device)
    layer = make_lora_layer(mixed_ranks(7, 2, generator), K, (32, 32), generator, device=device)
    check_lora(batch, layer, plan_lora(batch, Segments.allocate(64, device)), generator)


@pytest.mark.parametrize("rank", [*MIXED_RANKS, 17, 256])
@pytest.mark.parametrize("chunk_rows", [1, 64])
def test_every_rank(rank: int, chunk_rows: int, device: torch.device, generator: torch.Generator) -> None:
    """A rank of its own as the largest in use, beside a neighbour of rank 2."""
    batch = rows_of([0, 1, BASE], device)
    layer = make_lora_layer([[rank], [2]], 48, (33,), generator, device=device)
    check_lora(batch, layer, chunked(batch, chunk_rows), generator)


@pytest.mark.parametrize("chunk_rows", [16, 64, 128])
def test_chunk_sizes(chunk_rows: int, device: torch.device, generator: torch.Generator) -> None:
    """Segments of a chunk less one, exactly one, one more, and one row."""
    sizes = (chunk_rows - 1, chunk_rows, chunk_rows + 1, 1)
    batch = make_batch(sizes, sizes, [3, 0, 2, 1], generator, device)
    layer = make_lora_layer([[8], [3], [16], [1]], 32, (32,), generator, torch.float16, device)
    check_lora(batch, layer, chunked(batch, chunk_rows), generator)


@pytest.mark.parametrize("in_features", [1, 127, 129, 1100])
def test_widths_around_the_tiles(in_features: int, device: torch.device, generator: torch.Generator) -> None:
    """1100 features make two parts; slices of 300 and 7 columns end inside a tile."""
    batch = rows_of([0, 1, 0, BASE], device)
    layer = make_lora_layer([[4, 0], [3, 5]], in_features, (300, 7), generator, device=device)
    for chunk_rows in (1, 16):
        check_lora(batch, layer, chunked(batch, chunk_rows), generator)


def test_slices_without_an_adapter_keep_their_bits(device: torch.device, generator: torch.Generator) -> None:
    batch = rows_of([0, 0, 0], device)
    layer = make_lora_layer([[4, 0, 4]], K, QKV, generator, device=device)
    y = random((3, 80), generator, layer)
    before = y.clone()
    lora(y, random((3, K), generator, layer), layer, chunked(batch, 16))
    assert torch.equal(y[:, 48:64], before[:, 48:64])
    assert (y[:, :48] != before[:, :48]).all() and (y[:, 64:] != before[:, 64:]).all()


@pytest.mark.parametrize("chunk_rows", [1, 16])
def test_strided_rows(chunk_rows: int, device: torch.device, generator: torch.Generator) -> None:
    """x and y may be column ranges of wider tensors; what lies beside them is not touched."""
    batch = rows_of([1, 0, 1], device)
    layer = make_lora_layer([[4], [9]], K, (40,), generator, device=device)
    wide_x, wide_y = random((3, K + 10), generator, layer), random((3, 60), generator, layer)
    x, y, want = wide_x[:, 5 : 5 + K], wide_y[:, 10:50], wide_y.clone()
    reference.lora(want[:, 10:50], x, layer, batch.token_adapter)
    lora(y, x, layer, chunked(batch, chunk_rows))
    assert worst_error(wide_y, want) <= 1
    assert torch.equal(wide_y[:, :10], want[:, :10]) and torch.equal(wide_y[:, 50:], want[:, 50:])


def test_float32_output_of_half_inputs(device: torch.device, generator: torch.Generator) -> None:
    batch = rows_of([0, BASE], device)
    layer = make_lora_layer([[8]], K, (32,), generator, torch.float16, device)
    x = random((2, K), generator, layer)
    y = torch.zeros(2, 32, device=device)
    want = y.clone()
    reference.lora(want, x, layer, batch.token_adapter)
    lora(y, x, layer, chunked(batch, 16))
    assert worst_error(y.half(), want) <= 1


@pytest.mark.parametrize("chunk_rows", [1, 16, 64, 128])
def test_a_row_alone_equals_the_row_in_any_batch(
    chunk_rows: int, device: torch.device, generator: torch.Generator
) -> None:
    """Bit for bit, in every form, with two parts of K and neighbours of larger rank; KER-11, KER-13.

    On a GPU the claim is made for tiles of 16 rows: above, newer ones take another matrix instruction.
    """
    if device.type == "cuda":
        chunk_rows = min(chunk_rows, 16)
    layer = make_lora_layer([[24, 3], [5, 5], [64, 16]], 1100, (40, 24), generator, device=device)
    adapters = [2, 0, BASE, 1, 0, 0, 2]
    x, y = random((7, 1100), generator, layer), random((7, 64), generator, layer)
    together = y.clone()
    lora(together, x, layer, chunked(rows_of(adapters, device), chunk_rows))
    small = replace(layer, tables=LoraTables(layer.tables.row_table, layer.tables.ranks, 24))
    for row in (0, 3, 5):
        alone = y[row : row + 1].clone()
        own = layer if adapters[row] == 2 else small  # alone, a smaller largest rank chooses another tile
        lora(alone, x[row : row + 1], own, chunked(rows_of([adapters[row]], device), 1))
        assert torch.equal(alone[0], together[row]), f"row {row}"


def test_parts_in_one_program_equal_parts_in_many(device: torch.device, generator: torch.Generator) -> None:
    layer = make_lora_layer([[4]], 1100, (16,), generator, device=device)
    x, y = random((1, 1100), generator, layer), random((1, 16), generator, layer)
    plan = chunked(rows_of([0], device), 1)
    spread, together = y.clone(), y.clone()
    lora(spread, x, layer, plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernels.lora.PROGRAMS_WANTED", 0)
        lora(together, x, layer, plan)
    assert torch.equal(spread, together)


def test_run_to_run(device: torch.device, generator: torch.Generator) -> None:
    """KER-11: no atomics, so twenty runs give the same bits."""
    batch = rows_of([0, 1], device)
    layer = make_lora_layer([[8], [8]], 1100, (16,), generator, device=device)
    x = random((2, 1100), generator, layer)
    results = []
    for _ in range(20 if device.type == "cuda" else 2):
        results.append(torch.zeros(2, 16, device=device))
        lora(results[-1], x, layer, chunked(batch, 1))
    assert all(torch.equal(result, results[0]) for result in results)


def test_one_row_of_a_small_rank(device: torch.device, generator: torch.Generator) -> None:
    """KER-09: one decoding sequence, ranks below and above the matrix unit's smallest tile."""
    for rank in (4, 32):
        batch = rows_of([0], device)
        layer = make_lora_layer([[rank]], 64, (32,), generator, torch.float16, device)
        check_lora(batch, layer, plan_lora(batch, Segments.allocate(1, device)), generator)


def test_ops_plans_once_and_adds_to_every_layer(device: torch.device, generator: torch.Generator) -> None:
    ops = TritonOps(max_tokens=32, device=device)
    batch = make_batch([9, 8], [9, 8], [0, BASE], generator, device)
    ops.plan(batch)
    for _ in range(2):
        layer = make_lora_layer([[3]], K, (32,), generator, device=device)
        x, y = random((17, K), generator, layer), random((17, 32), generator, layer)
        want = y.clone()
        reference.lora(want, x, layer, batch.token_adapter)
        ops.lora(y, x, layer, batch)
        assert worst_error(y, want) <= 1


def test_a_step_of_base_rows_launches_nothing(device: torch.device, generator: torch.Generator) -> None:
    ops = TritonOps(max_tokens=8, device=device)
    batch = decode_batch("all_base", 3, generator, device)
    ops.plan(batch)
    layer = make_lora_layer([], K, (32,), generator, device=device)
    y = torch.full((3, 32), float("nan"), device=device)
    ops.lora(y, torch.full((3, K), float("nan"), device=device), layer, batch)
    assert y.isnan().all()


def test_more_active_adapters_claimed_than_there_are(device: torch.device, generator: torch.Generator) -> None:
    """A captured graph assumes the most; KER-05: its padding rows belong to nobody."""
    batch = replace(rows_of([0, 0, 0, BASE], device), num_active_adapters=4)
    layer = make_lora_layer([[3]], K, (32,), generator, device=device)
    check_lora(batch, layer, plan_lora(batch, Segments.allocate(4, device)), generator)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layer: replace(layer, a=layer.a.half()), "a: dtype"),
        (lambda layer: replace(layer, b=layer.b[:, :30]), "b: shape"),
        (lambda layer: replace(layer, slice_offsets=(0, 40, 32)), "slice_offsets"),
        (lambda layer: replace(layer, slice_offsets=(0, 32)), "slice_offsets"),
        (lambda layer: replace(layer, tables=replace(layer.tables, max_rank=9)), "max_rank: 9, row_table holds 8"),
        (lambda layer: replace(layer, tables=replace(layer.tables, ranks=layer.tables.ranks.long())), "ranks: dtype"),
    ],
)
def test_refuses_what_it_would_compute_wrongly(
    change: object, message: str, device: torch.device, generator: torch.Generator
) -> None:
    """KER-07: a rank beyond the tables is refused, never cut."""
    layer = make_lora_layer([[8, 8]], K, (16, 16), generator, device=device)
    batch = rows_of([0], device)
    with pytest.raises(ValueError, match=message):
        lora(torch.zeros(1, 32, device=device), torch.zeros(1, K, device=device), change(layer), chunked(batch, 1))  # type: ignore[operator]
