"""Sampling for a whole batch without a host round trip. Meaning and order of the filters: kernels/reference/sampling.py.

One program per row. The row's weights are written once to scratch, which stays in the L2 cache for the passes that
follow. Top-k and top-p look for their threshold in the bits of the weights (of non-negative floats the order of the bits
is the order of the values), two bits per pass: 15 passes, no sort, no dependence on the order of equal weights. Sums run
in a fixed order: a row's draw depends on its own logits, parameters, seed and position only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.compile_case import CompileCase, ModelShape
from kernels.reference.sampling import check_sample_arguments

_NUM_WARPS = 16
_LARGEST_TILE = 8192


@triton.jit
def _greatest_threshold(weights_ptr, floor, wanted, vocab, COUNT: tl.constexpr, TILE: tl.constexpr):
    """Bits of the greatest t such that the weights >= t number (COUNT) or sum to (those >= floor) at least `wanted`."""
    low = 0
    for step in range(15):
        unit = 1 << (28 - 2 * step)
        over_1 = tl.zeros([TILE], tl.float32)
        over_2 = tl.zeros([TILE], tl.float32)
        over_3 = tl.zeros([TILE], tl.float32)
        for start in range(0, vocab, TILE):
            cols = start + tl.arange(0, TILE)
            weights = tl.load(weights_ptr + cols, mask=cols < vocab, other=-1.0)
            value = tl.where(weights >= floor, weights, 0.0)
            if COUNT:
                value = tl.full([TILE], 1.0, tl.float32)
            bits = weights.to(tl.int32, bitcast=True)
            over_1 += tl.where(bits >= low + unit, value, 0.0)
            over_2 += tl.where(bits >= low + 2 * unit, value, 0.0)
            over_3 += tl.where(bits >= low + 3 * unit, value, 0.0)
        low += tl.where(tl.sum(over_1, axis=0) >= wanted, unit, 0)
        low += tl.where(tl.sum(over_2, axis=0) >= wanted, unit, 0)
        low += tl.where(tl.sum(over_3, axis=0) >= wanted, unit, 0)
    return low


@triton.jit
def _kept(weights_ptr, start, threshold, vocab, TILE: tl.constexpr):
    """A tile of weights with those below the threshold as zero."""
    cols = start + tl.arange(0, TILE)
    weights = tl.load(weights_ptr + cols, mask=cols < vocab, other=0.0)
    return tl.where(weights >= threshold, weights, 0.0)


@triton.jit
def _sum_kept(weights_ptr, threshold, vocab, TILE: tl.constexpr):
    total = 0.0
    for start in range(0, vocab, TILE):
        total += tl.sum(_kept(weights_ptr, start, threshold, vocab, TILE), axis=0)
    return total


@triton.jit
def _sample_kernel(
    logits_ptr,  # [R, V] fp32
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    position_ptr,
    weights_ptr,  # [R, stride] fp32 scratch
    out_ptr,  # [R] int64
    vocab,
    stride_logits_row,
    stride_weights_row,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits_row
    weights_ptr += row * stride_weights_row
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_id = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab, TILE):
        cols = start + tl.arange(0, TILE)
        logits = tl.load(logits_ptr + cols, mask=cols < vocab, other=float("-inf"))
        best_id = tl.where(logits > best, cols, best_id)
        best = tl.maximum(best, logits)
    top = tl.max(best, axis=0)
    choice = tl.min(tl.where(best == top, best_id, vocab), axis=0)  # the lowest id of equals
    tl.store(out_ptr + row, choice.to(tl.int64))
    temperature = tl.load(temperature_ptr + row)
    if (temperature == 0.0) | (top == float("-inf")):
        return

    for start in range(0, vocab, TILE):
        cols = start + tl.arange(0, TILE)
        logits = tl.load(logits_ptr + cols, mask=cols < vocab, other=float("-inf"))
        # Of the largest exactly 1: no temperature, however small, makes it 0 / 0.
        weights = tl.where(logits == top, 1.0, tl.exp((logits - top) / temperature))
        tl.store(weights_ptr + cols, weights, mask=cols < vocab)
    tl.debug_barrier()  # the passes below read what other threads of this program wrote

    threshold = tl.load(min_p_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    if (top_k > 0) & (top_k < vocab):
        bits = _greatest_threshold(weights_ptr, 0.0, top_k.to(tl.float32), vocab, True, TILE)
        threshold = tl.maximum(threshold, bits.to(tl.float32, bitcast=True))
    top_p = tl.load(top_p_ptr + row)
    if top_p < 1.0:
        wanted = tl.maximum(top_p * _sum_kept(weights_ptr, threshold, vocab, TILE), 1e-30)  # the best token stays
        bits = _greatest_threshold(weights_ptr, threshold, wanted, vocab, False, TILE)
        threshold = tl.maximum(threshold, bits.to(tl.float32, bitcast=True))

    word, _, _, _ = tl.philox(tl.load(seed_ptr + row), tl.load(position_ptr + row).to(tl.uint32), 0, 0, 0)
    uniform = (word.to(tl.uint32) >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2⁻²⁴
    target = uniform * _sum_kept(weights_ptr, threshold, vocab, TILE)
    # The tile in which the running sum passes the target; through rounding possibly none: then the last with a weight.
    running = 0.0
    before = 0.0
    chosen = 0
    for start in range(0, vocab, TILE):
        tile = tl.sum(_kept(weights_ptr, start, threshold, vocab, TILE), axis=0)
        open_tile = (running <= target) & (tile > 0.0)
        before = tl.where(open_tile, running, before)
        chosen = tl.where(open_tile, start, chosen)
        running += tile
    kept = _kept(weights_ptr, chosen, threshold, vocab, TILE)
    index = tl.arange(0, TILE)
    passed = (tl.cumsum(kept, axis=0) > target - before) & (kept > 0.0)
    first = tl.min(tl.where(passed, index, TILE), axis=0)
    last = tl.max(tl.where(kept > 0.0, index, -1), axis=0)
    tl.store(out_ptr + row, (chosen + tl.minimum(first, last)).to(tl.int64))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """Draw one token per row of `logits` [R, V] fp32 (rows contiguous) -> ids [R] int64; as the reference.

    Running sums are in fp32: where the random number falls within rounding of the border between two tokens, the
    reference may draw the other.
    """
    check_sample_arguments(logits, temperature, top_k, top_p, min_p, seed, position)
    rows, vocab = logits.shape
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        weights = torch.empty_like(logits, memory_format=torch.contiguous_format)
        _sample_kernel[(rows,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            position,
            weights,
            ids,
            vocab,
            logits.stride(0),
            weights.stride(0),
            TILE=_tile(vocab),
            num_warps=_NUM_WARPS,
        )
    return ids


def _tile(vocab: int) -> int:
    return int(min(triton.next_power_of_2(vocab), _LARGEST_TILE))


def compile_cases(shape: ModelShape, dtype: str) -> list[CompileCase]:
    """Logits are fp32 whatever the model's dtype."""
    types = dict.fromkeys(("logits_ptr", "weights_ptr", "temperature_ptr", "top_p_ptr", "min_p_ptr"), "*fp32")
    types |= {"top_k_ptr": "*i32", "position_ptr": "*i32", "seed_ptr": "*i64", "out_ptr": "*i64"}
    return [
        CompileCase(
            label=f"sample V={shape.vocab}",
            kernel=_sample_kernel,
            types=types,
            constexprs={"TILE": _tile(shape.vocab)},
            num_warps=_NUM_WARPS,
            num_stages=1,
            wide_loads=True,
        )
    ]
