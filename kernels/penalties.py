"""Logit bias and penalties for a whole batch, in place, without a host round trip.

Meaning: `apply_bias` and `apply_penalties` of kernels/reference/sampling.py. The ragged lists are read flat: each entry
finds its row in the indptr. Occurrences are counted with integer atomics, whose sum does not depend on their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.compile_case import CompileCase, ModelShape
from kernels.reference.sampling import check_bias_arguments, check_penalty_arguments

_TILE = 64  # list entries of one program
_COLS = 2048  # logits of one program
_LEAST_ROWS = 16  # fewer are compiled for as many
_IN_PROMPT = tl.constexpr(1 << 30)  # set in a count whose token stands in the prompt


@triton.jit
def _row_of(entries, indptr_ptr, rows, ROWS: tl.constexpr):
    """The row each entry belongs to: how many rows end at or before it."""
    row = tl.arange(0, ROWS)
    ends = tl.load(indptr_ptr + 1 + row, mask=row < rows, other=2147483647)
    return tl.sum((ends[None, :] <= entries[:, None]).to(tl.int32), axis=1)


@triton.jit
def _count_kernel(
    ids_ptr, indptr_ptr, counts_ptr, rows, vocab, OUTPUT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):
    """counts[row, id] += 1 for the output's tokens, |= _IN_PROMPT for the prompt's."""
    entries = tl.program_id(0) * TILE + tl.arange(0, TILE)
    listed = entries < tl.load(indptr_ptr + rows)
    ids = tl.load(ids_ptr + entries, mask=listed, other=-1)
    row = _row_of(entries, indptr_ptr, rows, ROWS)
    at = counts_ptr + row.to(tl.int64) * vocab + ids
    inside = (ids >= 0) & (ids < vocab)
    if OUTPUT:
        tl.atomic_add(at, 1, mask=inside, sem="relaxed")
    else:
        tl.atomic_or(at, _IN_PROMPT, mask=inside, sem="relaxed")


@triton.jit
def _penalise_kernel(
    logits_ptr, counts_ptr, repetition_ptr, presence_ptr, frequency_ptr, vocab, stride_logits_row, COLS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    counts = tl.load(counts_ptr + row * vocab + cols, mask=cols < vocab, other=0)
    logits_at = logits_ptr + row * stride_logits_row + cols
    logits = tl.load(logits_at, mask=counts != 0, other=0.0)
    repetition = tl.load(repetition_ptr + row)
    logits = tl.where(logits > 0.0, logits / repetition, logits * repetition)
    in_output = counts & (_IN_PROMPT - 1)
    logits -= tl.load(frequency_ptr + row) * in_output.to(tl.float32)
    logits -= tl.where(in_output > 0, tl.load(presence_ptr + row), 0.0)
    tl.store(logits_at, logits, mask=counts != 0)


@triton.jit
def _bias_kernel(
    logits_ptr, ids_ptr, values_ptr, indptr_ptr, rows, vocab, stride_logits_row, ROWS: tl.constexpr, TILE: tl.constexpr
):
    entries = tl.program_id(0) * TILE + tl.arange(0, TILE)
    listed = entries < tl.load(indptr_ptr + rows)
    ids = tl.load(ids_ptr + entries, mask=listed, other=-1)
    inside = (ids >= 0) & (ids < vocab)
    row = _row_of(entries, indptr_ptr, rows, ROWS)
    at = logits_ptr + row.to(tl.int64) * stride_logits_row + ids
    biased = tl.load(at, mask=inside, other=0.0) + tl.load(values_ptr + entries, mask=inside, other=0.0)
    tl.store(at, biased, mask=inside)


def apply_penalties(
    logits: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    prompt_ids: Tensor,
    prompt_indptr: Tensor,
    output_ids: Tensor,
    output_indptr: Tensor,
) -> None:
    """Penalise in place what `logits` [R, V] fp32 would repeat; arguments as the reference's."""
    check_penalty_arguments(
        logits, repetition, presence, frequency, prompt_ids, prompt_indptr, output_ids, output_indptr
    )
    rows, vocab = logits.shape
    if not rows:
        return
    counts = torch.zeros((rows, vocab), dtype=torch.int32, device=logits.device)
    for ids, indptr, output in ((prompt_ids, prompt_indptr, False), (output_ids, output_indptr, True)):
        if ids.numel():
            grid = (triton.cdiv(ids.numel(), _TILE),)
            _count_kernel[grid](ids, indptr, counts, rows, vocab, OUTPUT=output, ROWS=_rows(rows), TILE=_TILE)
    _penalise_kernel[(rows, triton.cdiv(vocab, _COLS))](
        logits, counts, repetition, presence, frequency, vocab, logits.stride(0), COLS=_COLS
    )


def apply_bias(logits: Tensor, ids: Tensor, values: Tensor, indptr: Tensor) -> None:
    """logits[r, ids[i]] += values[i] in place for row r's entries i; arguments as the reference's."""
    check_bias_arguments(logits, ids, values, indptr)
    rows, vocab = logits.shape
    if ids.numel():
        _bias_kernel[(triton.cdiv(ids.numel(), _TILE),)](
            logits, ids, values, indptr, rows, vocab, logits.stride(0), ROWS=_rows(rows), TILE=_TILE
        )


def _rows(rows: int) -> int:
    return int(max(_LEAST_ROWS, triton.next_power_of_2(rows)))


def compile_cases(shape: ModelShape, dtype: str) -> list[CompileCase]:
    """Logits are fp32 whatever the model's dtype."""
    types = dict.fromkeys(("logits_ptr", "repetition_ptr", "presence_ptr", "frequency_ptr", "values_ptr"), "*fp32")
    types |= {"ids_ptr": "*i64", "indptr_ptr": "*i32", "counts_ptr": "*i32"}
    lists = {"ROWS": _LEAST_ROWS, "TILE": _TILE}
    kernels = (
        ("count prompt", _count_kernel, {"OUTPUT": False, **lists}),
        ("count output", _count_kernel, {"OUTPUT": True, **lists}),
        ("penalise", _penalise_kernel, {"COLS": _COLS}),
        ("bias", _bias_kernel, lists),
    )
    return [
        CompileCase(
            label=f"{name} V={shape.vocab}",
            kernel=kernel,
            types=types,
            constexprs=constexprs,
            num_warps=4,
            num_stages=1,
            wide_loads=kernel is _penalise_kernel,
            unaligned=("rows",),
        )
        for name, kernel, constexprs in kernels
    ]
