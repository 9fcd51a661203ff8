"""CPU operations against their definitions, native and in plain torch; and each row alone against itself in a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.cpu import library
from kernels.cpu import ops as cpu_ops
from kernels.cpu.ops import CpuOps, quantise
from kernels.layouts import BASE, PAGE_SIZE, Batch, KVLayer, LoraLayer
from kernels.reference.ops import ReferenceOps
from kernels.tolerances import worst_error
from kernels.workloads import MIXES, assign, make_batch, make_lora_layer, mixed_ranks

REFERENCE = ReferenceOps()
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
EPS = 1e-5
# Around a page, a split of 256 positions, and chunks with and without context: (new tokens, context after them).
REQUESTS = ((1, 1), (1, 15), (1, 16), (1, 17), (5, 5), (16, 16), (17, 40), (1, 256), (1, 257), (1, 600), (40, 300))
MODELS = {"9/3": (9, 3, 64), "32/8": (32, 8, 128), "4/4": (4, 4, 32)}


@pytest.fixture(params=["native", "torch"])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[CpuOps]:
    if request.param == "torch":
        monkeypatch.setattr(library, "load", lambda: None)
    yield CpuOps()


@pytest.fixture(scope="module")
def native() -> CpuOps:
    ops = CpuOps()
    assert ops._native is not None, "the native kernels do not build here"
    return ops


def make_kv(batch: Batch, num_kv_heads: int, head_dim: int, dtype: torch.dtype, generator: torch.Generator) -> KVLayer:
    """Pages whose slots past every request's context hold NaN."""
    shape = (int(batch.page_table.max()) + 1, num_kv_heads, PAGE_SIZE, head_dim)
    k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    for request, context in enumerate(batch.context_lens.tolist()):
        if context % PAGE_SIZE:
            last = int(batch.page_table[request, context // PAGE_SIZE])
            k[last, :, context % PAGE_SIZE :] = v[last, :, context % PAGE_SIZE :] = float("nan")
    return KVLayer(k, v)


def batch_of(requests: tuple[tuple[int, int], ...], generator: torch.Generator, padding_rows: int = 2) -> Batch:
    queries, contexts = zip(*requests, strict=True)
    return make_batch(queries, contexts, [BASE] * len(requests), generator, padding_rows=padding_rows)


def alone(batch: Batch, request: int, first: int, last: int) -> Batch:
    """Rows `first` to `last` of one request's new tokens as a step of their own."""
    start, end = batch.query_indptr[request : request + 2].tolist()
    rows = slice(start + first, start + last)
    context = int(batch.context_lens[request]) - (end - start) + last

    def index(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return Batch(
        batch.positions[rows].clone(), batch.token_adapter[rows].clone(), batch.slot_mapping[rows].clone(),
        index([0, last - first]), index([context]), batch.page_table[request : request + 1].clone(),
        last - first, 1, last - first, context, batch.num_active_adapters,
    )  # fmt: skip


@DTYPES
@pytest.mark.parametrize("window", [None, 19, 300])
@pytest.mark.parametrize("model", MODELS)
def test_attention(ops: CpuOps, model: str, window: int | None, dtype: torch.dtype, generator: torch.Generator) -> None:
    heads, kv_heads, head_dim = MODELS[model]
    batch = batch_of(REQUESTS, generator)
    kv = make_kv(batch, kv_heads, head_dim, dtype, generator)
    # As kv_append leaves it: a view with a stride.
    q = torch.randn(len(batch.positions), heads + 2, head_dim, generator=generator).to(dtype)[:, :heads]
    ops.plan(batch)
    got = ops.paged_attention(q, kv, batch, head_dim**-0.5, window, None)
    assert worst_error(got, REFERENCE.paged_attention(q, kv, batch, head_dim**-0.5, window, None)) <= 1
    assert not got[-2:].any()  # rows of no request


@DTYPES
@pytest.mark.parametrize("window", [None, 19])
def test_attention_of_a_row_is_the_same_alone(
    native: CpuOps, window: int | None, dtype: torch.dtype, generator: torch.Generator
) -> None:
    batch = batch_of(REQUESTS, generator)
    kv = make_kv(batch, 3, 64, dtype, generator)
    q = torch.randn(len(batch.positions), 9, 64, generator=generator).to(dtype)
    native.plan(batch)
    together = native.paged_attention(q, kv, batch, 0.125, window, None)
    for request, (length, _) in enumerate(REQUESTS):
        start = int(batch.query_indptr[request])
        # Whole, and cut where a scheduler might: a chunk's row does not depend on the chunk.
        for first, last in {(0, length), (0, (length + 1) // 2), (length - 1, length)}:
            one = alone(batch, request, first, last)
            native.plan(one)
            rows = slice(start + first, start + last)
            assert torch.equal(native.paged_attention(q[rows], kv, one, 0.125, window, None), together[rows])


@DTYPES
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_kv_append(ops: CpuOps, model: str, norms: bool, dtype: torch.dtype, generator: torch.Generator) -> None:
    heads, kv_heads, head_dim = MODELS[model]
    batch = batch_of(REQUESTS, generator)
    shape = (int(batch.page_table.max()) + 1, kv_heads, PAGE_SIZE, head_dim)
    got, want = (KVLayer(*(torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))) for _ in range(2))
    qkv = torch.randn(len(batch.positions), (heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype)
    cos_sin = torch.randn(600, head_dim, generator=generator)
    q_norm, k_norm = (torch.randn(head_dim, generator=generator).to(dtype) if norms else None for _ in range(2))
    ops.plan(batch)
    q = ops.kv_append(qkv.clone(), heads, cos_sin, got, batch, q_norm, k_norm, EPS)
    expected = REFERENCE.kv_append(qkv.clone(), heads, cos_sin, want, batch, q_norm, k_norm, EPS)
    assert worst_error(q, expected) <= 1
    for ours, theirs in ((got.k_pages, want.k_pages), (got.v_pages, want.v_pages)):
        assert torch.equal(ours.isnan(), theirs.isnan())  # no other slot is touched
        assert worst_error(ours.nan_to_num(), theirs.nan_to_num()) <= 1
    if ops._native is not None:  # a row alone gives the same bits: writing it again changes nothing
        pages = got.k_pages.clone()
        row = alone(batch, 6, 3, 4)
        start = int(batch.query_indptr[6]) + 3
        again = ops.kv_append(qkv[start : start + 1].clone(), heads, cos_sin, got, row, q_norm, k_norm, EPS)
        assert torch.equal(again[0], q[start])
        assert torch.equal(got.k_pages.nan_to_num(), pages.nan_to_num())


@DTYPES
@pytest.mark.parametrize("width", [576, 37])
def test_norm_and_activation(ops: CpuOps, width: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    x, residual = (torch.randn(33, width, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(width, generator=generator).to(dtype)
    assert worst_error(ops.rms_norm(x, weight, EPS), REFERENCE.rms_norm(x, weight, EPS)) <= 1
    ours, theirs = residual.clone(), residual.clone()
    assert worst_error(ops.add_rms_norm(x, ours, weight, EPS), REFERENCE.add_rms_norm(x, theirs, weight, EPS)) <= 1
    assert torch.equal(ours, theirs)
    gate_up = torch.randn(33, 2 * width, generator=generator).mul(20).to(dtype)
    for kind in ("silu", "gelu_tanh"):
        assert worst_error(ops.act_mul(gate_up, kind), REFERENCE.act_mul(gate_up, kind)) <= 1
    if ops._native is not None:
        assert torch.equal(ops.rms_norm(x[4:5], weight, EPS), ops.rms_norm(x, weight, EPS)[4:5])
        assert torch.equal(ops.act_mul(gate_up[4:5], "silu"), ops.act_mul(gate_up, "silu")[4:5])


def lora_case(mix: str, dtype: torch.dtype, generator: torch.Generator) -> tuple[Batch, LoraLayer, Tensor, Tensor]:
    lengths = [1] * 14 + [70, 3]
    batch = make_batch(lengths, lengths, assign(mix, len(lengths), generator), generator)
    layer = make_lora_layer(mixed_ranks(len(lengths), 3, generator), 200, [96, 32, 40], generator, dtype)
    x, y = (torch.randn(len(batch.positions), n, generator=generator).to(dtype) for n in (200, 168))
    return batch, layer, x, y


@DTYPES
@pytest.mark.parametrize("mix", MIXES)
def test_lora(ops: CpuOps, mix: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    batch, layer, x, y = lora_case(mix, dtype, generator)
    got, want = y.clone(), y.clone()
    ops.plan(batch)
    ops.lora(got, x, layer, batch)
    REFERENCE.lora(want, x, layer, batch)
    # Sums in the dtype itself where plain torch does them.
    assert worst_error(got, want) <= (1 if ops._native is not None else 8)
    base = batch.token_adapter == BASE
    assert torch.equal(got[base], y[base])


@DTYPES
def test_lora_of_a_row_is_the_same_alone(native: CpuOps, dtype: torch.dtype, generator: torch.Generator) -> None:
    batch, layer, x, y = lora_case("uniform", dtype, generator)
    together = y.clone()
    native.plan(batch)
    native.lora(together, x, layer, batch)
    for request in range(batch.num_requests):
        start, end = batch.query_indptr[request : request + 2].tolist()
        for rows in (slice(start, end), slice(end - 1, end)):
            one = alone(batch, request, rows.start - start, rows.stop - start)
            native.plan(one)
            out = y[rows].clone()
            native.lora(out, x[rows].contiguous(), layer, one)
            assert torch.equal(out, together[rows])


@DTYPES
@pytest.mark.parametrize("weight_dtype", [None, "int8"])
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 70, 300])
def test_linear(ops: CpuOps, rows: int, weight_dtype: None, dtype: torch.dtype, generator: torch.Generator) -> None:
    ops._weight_dtype = weight_dtype
    weight = torch.randn(50, 1100, generator=generator).mul(1100**-0.5).to(dtype)
    bias = torch.randn(50, generator=generator).to(dtype)
    x = torch.randn(rows, 1100, generator=generator).to(dtype)
    exact = weight.float()
    if weight_dtype == "int8":
        stored, scales = quantise(weight)
        assert ((stored * scales.unsqueeze(1) - exact).abs() <= scales.unsqueeze(1) * 0.501).all()
        exact = stored * scales.unsqueeze(1)
    for given in (bias, None):
        want = x.float() @ exact.T + (0 if given is None else given.float())
        assert worst_error(ops.linear(x, ops.pack_linear(weight, given)), want) <= 1


@DTYPES
@pytest.mark.parametrize("weight_dtype", [None, "int8"])
def test_linear_of_a_row_is_the_same_alone(
    native: CpuOps, weight_dtype: None, dtype: torch.dtype, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_weight_dtype", weight_dtype)
    # Where the CPU computes in bf16 many rows go to oneDNN, which promises no bits.
    monkeypatch.setattr(cpu_ops, "prepacks", lambda dtype: False)
    packed = native.pack_linear(torch.randn(100, 500, generator=generator).to(dtype), None)
    x = torch.randn(300, 500, generator=generator).to(dtype)
    together = native.linear(x, packed)
    for rows in (1, 2, 3, 4, 5, 31, 257):
        for first in (0, 7, 300 - rows):
            if first + rows <= 300:
                assert torch.equal(native.linear(x[first : first + rows], packed), together[first : first + rows])
    torch.set_num_threads(3)
    assert torch.equal(native.linear(x, packed), together)
    torch.set_num_threads(1)


def test_a_weight_is_taken_by_its_own_width_only(native: CpuOps) -> None:
    packed = native.pack_linear(torch.ones(4, 8), None)
    with pytest.raises(ValueError, match="x: 9 features, the weight takes 8"):
        native.linear(torch.ones(1, 9), packed)


def test_threads_do_not_change_results(native: CpuOps, generator: torch.Generator) -> None:
    batch = batch_of(REQUESTS, generator)
    kv = make_kv(batch, 3, 64, torch.float32, generator)
    q = torch.randn(len(batch.positions), 9, 64, generator=generator)
    native.plan(batch)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(native.paged_attention(q, kv, batch, 0.125, None, None))
    torch.set_num_threads(1)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_a_batch_used_again_is_planned_anew(ops: CpuOps, generator: torch.Generator) -> None:
    """As a captured graph does: its tensors hold another step's values."""
    first, second = (batch_of(requests, generator, 0) for requests in (((1, 20), (1, 3)), ((1, 5), (1, 40))))
    q, pages = torch.randn(2, 4, 32, generator=generator), torch.randn(2, 8, 4, PAGE_SIZE, 32, generator=generator)
    ops.plan(first)
    ops.paged_attention(q, KVLayer(*pages), first, 1.0, None, None)
    for name in ("positions", "slot_mapping", "context_lens"):
        getattr(first, name).copy_(getattr(second, name))
    again = replace(first, page_table=second.page_table)
    ops.plan(again)
    got = ops.paged_attention(q, KVLayer(*pages), again, 1.0, None, None)
    assert worst_error(got, REFERENCE.paged_attention(q, KVLayer(*pages), second, 1.0, None, None)) <= 1
