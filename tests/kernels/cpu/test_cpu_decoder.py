"""All layers in one native call give the bits that the operations give one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import decoder as composed
from kernels.cpu import ops as cpu_ops
from kernels.cpu.ops import CpuOps
from kernels.layouts import PAGE_SIZE, Decoder, DecoderLayer, KVLayer, LoraLayer, LoraLayers
from kernels.workloads import MIXES, assign, make_batch, make_lora_layer, mixed_ranks

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM = 3, 96, 136, 6, 2, 32
LENGTHS = (1, 1, 5, 1, 20, 1, 1, 1)
CONTEXTS = (1, 40, 5, 17, 60, 300, 16, 2)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
QKV = (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)


@pytest.fixture
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CpuOps:
    # Where the CPU computes in bf16, batches of more rows than a few are oneDNN's.
    monkeypatch.setattr(cpu_ops, "prepacks", lambda dtype: False)
    ops = CpuOps(getattr(request, "param", None))
    assert ops._native is not None, "the native kernels do not build here"
    return ops


def make_decoder(
    ops: CpuOps, dtype: torch.dtype, generator: torch.Generator, *, extras: bool = False, activation: str = "silu"
) -> Decoder:
    """`extras`: with biases and norms of q and k."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def linear(n: int, k: int) -> object:
        return ops.pack_linear(normal(n, k).mul(k**-0.5).to(dtype), normal(n).to(dtype) if extras else None)

    def norm(n: int) -> Tensor:
        return (1 + 0.1 * normal(n)).to(dtype)

    layers = [
        DecoderLayer(
            norm(HIDDEN), linear(sum(QKV), HIDDEN), norm(DIM) if extras else None, norm(DIM) if extras else None,
            linear(HIDDEN, HEADS * DIM), norm(HIDDEN), linear(2 * INNER, HIDDEN), linear(HIDDEN, INNER),
        )
        for _ in range(LAYERS)
    ]  # fmt: skip
    window = 19 if extras else None
    return Decoder(layers, norm(HIDDEN), normal(512, DIM), HEADS, DIM**-0.5, window, activation, 1e-5)


def ran_natively(ops: CpuOps) -> bool:
    [described] = ops._described
    return described.native is not None and described.native.max_rows is None


def make_lora(count: int, dtype: torch.dtype, generator: torch.Generator) -> list[LoraLayers]:
    def group(k: int, *slices: int) -> list[LoraLayer]:
        ranks = mixed_ranks(count, len(slices), generator)
        return [make_lora_layer(ranks, k, slices, generator, dtype) for _ in range(LAYERS)]

    groups = zip(
        group(HIDDEN, *QKV), group(HEADS * DIM, HIDDEN), group(HIDDEN, INNER, INNER), group(INNER, HIDDEN), strict=True
    )
    return [LoraLayers(*layer) for layer in groups]


def run_both(
    ops: CpuOps,
    decoder: Decoder,
    mix: str,
    dtype: torch.dtype,
    generator: torch.Generator,
    lora: list[LoraLayers] | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """What the native call and the composition change and return: residual, output, K and V."""
    adapters = assign(mix, len(LENGTHS), generator)
    batch = make_batch(LENGTHS, CONTEXTS, adapters, generator, padding_rows=2)
    shape = (int(batch.page_table.max()) + 1, KV_HEADS, PAGE_SIZE, DIM)
    pages = [[torch.randn(shape, generator=generator).to(dtype) for _ in range(2)] for _ in range(LAYERS)]
    start = torch.randn(len(batch.positions), HIDDEN, generator=generator).to(dtype)
    results = []
    for run in (ops.decoder, lambda *arguments: composed.run(ops, *arguments)):
        kv = [KVLayer(k.clone(), v.clone()) for k, v in pages]
        hidden = start.clone()
        ops.plan(batch)
        out = run(decoder, hidden, kv, lora, batch)
        results.append([out, hidden, *(tensor for layer in kv for tensor in (layer.k_pages, layer.v_pages))])
    return results[0], results[1]


@DTYPES
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("ops", [None, "int8"], indirect=True)
def test_the_same_bits(ops: CpuOps, mix: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    decoder = make_decoder(ops, dtype, generator)
    lora = make_lora(len(LENGTHS), dtype, generator)
    native, step_by_step = run_both(ops, decoder, mix, dtype, generator, lora)
    for got, want in zip(native, step_by_step, strict=True):
        assert not got.isnan().any() and torch.equal(got, want)
    assert ran_natively(ops)


@DTYPES
def test_the_same_bits_with_biases_head_norms_and_a_window(
    ops: CpuOps, dtype: torch.dtype, generator: torch.Generator
) -> None:
    decoder = make_decoder(ops, dtype, generator, extras=True)
    native, step_by_step = run_both(ops, decoder, "all_base", dtype, generator, None)
    for got, want in zip(native, step_by_step, strict=True):
        assert torch.equal(got, want)
    assert ran_natively(ops)


def test_what_it_does_not_take_goes_step_by_step(ops: CpuOps, generator: torch.Generator) -> None:
    decoder = make_decoder(ops, torch.float32, generator, activation="gelu")
    native, step_by_step = run_both(ops, decoder, "all_base", torch.float32, generator, None)
    for got, want in zip(native, step_by_step, strict=True):
        assert torch.equal(got, want)
    assert not ran_natively(ops)


def test_layers_of_which_only_some_have_both_layouts_go_step_by_step(
    ops: CpuOps, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a large bf16 model where oneDNN computes in bf16: the second layout is kept for the first layers only."""
    monkeypatch.setattr(CpuOps, "_onednn_is_faster", lambda self, dtype: True)
    monkeypatch.setattr(cpu_ops, "_BOTH_LAYOUTS_BYTES", 200_000)
    decoder = make_decoder(ops, torch.float32, generator)
    linears = [packed for layer in decoder.layers for packed in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    assert {packed.native is None for packed in linears} == {True, False}
    native, step_by_step = run_both(ops, decoder, "all_base", torch.float32, generator, None)
    for got, want in zip(native, step_by_step, strict=True):
        assert torch.equal(got, want)
    assert not ran_natively(ops)


@pytest.mark.parametrize("rows", [3, 12])
def test_where_all_have_both_layouts_few_rows_run_natively(
    ops: CpuOps, rows: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuOps, "_onednn_is_faster", lambda self, dtype: True)
    decoder = make_decoder(ops, torch.float32, generator)
    called = []
    assert ops._native is not None
    monkeypatch.setattr(ops._native, "decoder", lambda native, hidden, batch, plan: called.append(1) or hidden)
    batch = make_batch([1] * rows, [1] * rows, [-1] * rows, generator)
    kv = [KVLayer(*(torch.zeros(rows, KV_HEADS, PAGE_SIZE, DIM) for _ in range(2))) for _ in range(LAYERS)]
    ops.plan(batch)
    ops.decoder(decoder, torch.zeros(rows, HIDDEN), kv, None, batch)
    assert bool(called) == (rows <= 8)


def test_rows_that_are_not_the_batchs_are_refused(ops: CpuOps, generator: torch.Generator) -> None:
    decoder = make_decoder(ops, torch.float32, generator)
    batch = make_batch([1], [1], [-1], generator)
    kv = [KVLayer(*(torch.zeros(1, KV_HEADS, PAGE_SIZE, DIM) for _ in range(2))) for _ in range(LAYERS)]
    ops.plan(batch)
    with pytest.raises(ValueError, match="hidden: 2 rows, the batch has 1"):
        ops.decoder(decoder, torch.zeros(2, HIDDEN), kv, None, batch)
    with pytest.raises(ValueError, match="hidden"):
        ops.decoder(decoder, torch.zeros(1, HIDDEN).bfloat16(), kv, None, batch)


def test_another_bank_is_described_anew(ops: CpuOps, generator: torch.Generator) -> None:
    """As when a larger rank came: the runner then makes other layers."""
    decoder = make_decoder(ops, torch.float32, generator)
    for _ in range(12):
        lora = make_lora(len(LENGTHS), torch.float32, generator)
        native, step_by_step = run_both(ops, decoder, "uniform", torch.float32, generator, lora)
        assert torch.equal(native[0], step_by_step[0])


def test_logits_are_not_rounded_to_the_weights_type(ops: CpuOps, generator: torch.Generator) -> None:
    weight = torch.randn(50, 64, generator=generator).bfloat16()
    x = torch.randn(3, 64, generator=generator).bfloat16()
    logits = ops.logits(x, ops.pack_linear(weight, None))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ weight.float().T, atol=1e-5, rtol=1e-5)
