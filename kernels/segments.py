"""Batch metadata for LoRA, built on the device: order = stable argsort(token_adapter), cut into segments and chunks.

A segment is the run of `order` that shares an adapter; a chunk is at most `chunk_rows` rows of one segment and never
empty. Base rows come last in `order` and belong to neither. Two kernels, no host synchronisation, buffers whose addresses
never change, so the launches can be captured in a CUDA graph and all layers read the same tables.

The sort counts instead of moving: a token's place is the number of tokens that go before it. That is T² comparisons
(4 million at T = 2048, microseconds on a GPU), needs no bound on the number of adapters and no atomics.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.compile_case import CompileCase, ModelShape
from kernels.layouts import check, check_index

BLOCK_TOKENS = 32
BLOCK_OTHERS = 128
BLOCK_SCAN = 1024


@dataclass(frozen=True, slots=True)
class Segments:
    """Device buffers for steps of up to `max_tokens`; after `build_segments` the first T entries of each are valid."""

    order: Tensor  # [max_tokens] int32: token rows
    seg_indptr: Tensor  # [max_tokens + 1] int32: segment i is order[indptr[i] : indptr[i + 1]]; past the last: its end
    seg_adapter: Tensor  # [max_tokens] int32: -1 past the last segment
    chunk_adapter: Tensor  # [max_tokens] int32: -1 past the last chunk
    chunk_start: Tensor  # [max_tokens] int32: position in `order`
    chunk_len: Tensor  # [max_tokens] int32: 1 to chunk_rows; 0 past the last chunk
    scratch: Tensor  # [3, max_tokens] int32, by position in `order`: adapter, its segment's start and end

    @classmethod
    def allocate(cls, max_tokens: int, device: torch.device | str) -> Segments:
        def buffer(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        n = max_tokens
        return cls(buffer(n), buffer(n + 1), buffer(n), buffer(n), buffer(n), buffer(n), buffer(3, n))


@triton.jit
def _place_tokens_kernel(
    adapter_ptr,
    order_ptr,
    scratch_ptr,
    stride_scratch,
    num_tokens,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OTHERS: tl.constexpr,
):
    """Write each token, its adapter and its segment's bounds at the token's place in the sorted order."""
    last_key = 2147483647  # base rows and lanes past the end go last
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    adapter = tl.load(adapter_ptr + token, mask=token < num_tokens, other=-1)
    key = tl.where(adapter < 0, last_key, adapter)
    start = tl.zeros([BLOCK_TOKENS], tl.int32)  # tokens with a smaller key
    before = tl.zeros([BLOCK_TOKENS], tl.int32)  # tokens with the same key and a smaller row
    length = tl.zeros([BLOCK_TOKENS], tl.int32)  # tokens with the same key
    for first in range(0, num_tokens, BLOCK_OTHERS):
        other = first + tl.arange(0, BLOCK_OTHERS)
        exists = other < num_tokens
        other_adapter = tl.load(adapter_ptr + other, mask=exists, other=-1)
        other_key = tl.where(other_adapter < 0, last_key, other_adapter)
        same = (other_key[None, :] == key[:, None]) & exists[None, :]
        start += tl.sum((other_key[None, :] < key[:, None]).to(tl.int32), axis=1)
        before += tl.sum((same & (other[None, :] < token[:, None])).to(tl.int32), axis=1)
        length += tl.sum(same.to(tl.int32), axis=1)
    place = start + before
    live = token < num_tokens
    tl.store(order_ptr + place, token, mask=live)
    tl.store(scratch_ptr + place, adapter, mask=live)
    tl.store(scratch_ptr + stride_scratch + place, start, mask=live)
    tl.store(scratch_ptr + 2 * stride_scratch + place, start + length, mask=live)


@triton.jit
def _cut_kernel(
    scratch_ptr,
    stride_scratch,
    seg_indptr_ptr,
    seg_adapter_ptr,
    chunk_adapter_ptr,
    chunk_start_ptr,
    chunk_len_ptr,
    num_tokens,
    chunk_rows,
    BLOCK_SCAN: tl.constexpr,
):
    """One program: number the segment and chunk heads along the sorted order by prefix sums."""
    num_segments = 0
    num_chunks = 0
    num_adapted = 0
    for first in range(0, num_tokens, BLOCK_SCAN):
        place = first + tl.arange(0, BLOCK_SCAN)
        live = place < num_tokens
        adapter = tl.load(scratch_ptr + place, mask=live, other=-1)
        start = tl.load(scratch_ptr + stride_scratch + place, mask=live, other=0)
        end = tl.load(scratch_ptr + 2 * stride_scratch + place, mask=live, other=0)
        adapted = adapter >= 0
        seg_head = adapted & (place == start)
        chunk_head = adapted & ((place - start) % chunk_rows == 0)
        segment = num_segments + tl.cumsum(seg_head.to(tl.int32), axis=0) - 1
        chunk = num_chunks + tl.cumsum(chunk_head.to(tl.int32), axis=0) - 1
        tl.store(seg_indptr_ptr + segment, place, mask=seg_head)
        tl.store(seg_adapter_ptr + segment, adapter, mask=seg_head)
        tl.store(chunk_adapter_ptr + chunk, adapter, mask=chunk_head)
        tl.store(chunk_start_ptr + chunk, place, mask=chunk_head)
        tl.store(chunk_len_ptr + chunk, tl.minimum(end - place, chunk_rows), mask=chunk_head)
        num_segments += tl.sum(seg_head.to(tl.int32), axis=0)
        num_chunks += tl.sum(chunk_head.to(tl.int32), axis=0)
        num_adapted += tl.sum(adapted.to(tl.int32), axis=0)
    for first in range(0, num_tokens + 1, BLOCK_SCAN):
        i = first + tl.arange(0, BLOCK_SCAN)
        live = i < num_tokens
        tl.store(seg_indptr_ptr + i, num_adapted, mask=(i >= num_segments) & (i <= num_tokens))
        tl.store(seg_adapter_ptr + i, -1, mask=live & (i >= num_segments))
        tl.store(chunk_adapter_ptr + i, -1, mask=live & (i >= num_chunks))
        tl.store(chunk_start_ptr + i, 0, mask=live & (i >= num_chunks))
        tl.store(chunk_len_ptr + i, 0, mask=live & (i >= num_chunks))


def build_segments(token_adapter: Tensor, chunk_rows: int, out: Segments) -> None:
    """Fill the first T entries of `out` from `token_adapter` [T] int32 (-1 = base)."""
    check_index("token_adapter", token_adapter)
    check(token_adapter.dim() == 1, f"token_adapter: {token_adapter.dim()} dimensions, want 1")
    num_tokens = token_adapter.shape[0]
    check(num_tokens <= out.order.shape[0], f"token_adapter: {num_tokens} rows, buffers hold {out.order.shape[0]}")
    check(chunk_rows >= 1, f"chunk_rows: {chunk_rows}, want at least 1")
    if num_tokens == 0:
        out.seg_indptr[0] = 0
        return
    stride_scratch = out.scratch.stride(0)
    _place_tokens_kernel[(triton.cdiv(num_tokens, BLOCK_TOKENS),)](
        token_adapter,
        out.order,
        out.scratch,
        stride_scratch,
        num_tokens,
        BLOCK_TOKENS=BLOCK_TOKENS,
        BLOCK_OTHERS=BLOCK_OTHERS,
        num_warps=4,
    )
    _cut_kernel[(1,)](
        out.scratch,
        stride_scratch,
        out.seg_indptr,
        out.seg_adapter,
        out.chunk_adapter,
        out.chunk_start,
        out.chunk_len,
        num_tokens,
        chunk_rows,
        BLOCK_SCAN=BLOCK_SCAN,
        num_warps=4,
    )


def compile_cases(shape: ModelShape, dtype: str) -> list[CompileCase]:
    """The metadata depends on neither the model nor the dtype: every call names the same two cases."""
    place_types = {"adapter_ptr": "*i32", "order_ptr": "*i32", "scratch_ptr": "*i32"}
    cut_types = {name: "*i32" for name in _cut_kernel.arg_names if name.endswith("_ptr")}
    free = ("stride_scratch", "num_tokens", "chunk_rows")
    return [
        CompileCase(
            "segments: place",
            _place_tokens_kernel,
            place_types,
            {"BLOCK_TOKENS": BLOCK_TOKENS, "BLOCK_OTHERS": BLOCK_OTHERS},
            num_warps=4,
            num_stages=2,
            unaligned=free,
        ),
        CompileCase(
            "segments: cut",
            _cut_kernel,
            cut_types,
            {"BLOCK_SCAN": BLOCK_SCAN},
            num_warps=4,
            num_stages=2,
            unaligned=free,
        ),
    ]
