"""Prefill attention: chunks of two tokens and more over pages, with prior context.

One program takes (query, head) pairs that share a K/V head, so K and V are read once per group and tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels import attention_split
from kernels.attention_split import Tile, attend, constexprs, merge, normalise
from kernels.compile_case import CompileCase, ModelShape
from kernels.layouts import Batch

MAX_GROUP = 32  # rows of the smaller tile
_LEAST_REQUESTS = 16  # fewer are compiled for as many


@triton.jit
def _prefill_kernel(
    q_ptr,  # [T, H, D]
    k_pages_ptr,
    v_pages_ptr,
    k_scales_ptr,
    v_scales_ptr,
    page_table_ptr,
    query_indptr_ptr,
    context_lens_ptr,
    out_ptr,  # [T, H, D]
    scale,
    soft_cap,
    window,
    num_requests,
    stride_q_row,
    stride_page_table_row,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_D: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    REQUESTS: tl.constexpr,  # a power of two, at least num_requests
):
    group: tl.constexpr = H // G
    queries: tl.constexpr = ROWS // group  # of one tile
    # Request r's tiles start at query_indptr[r] // queries + r: no two requests share one, few stay empty, and no table
    # has to be built. This program's request is the last that starts at or before it.
    kv_head = tl.program_id(1)
    requests = tl.arange(0, REQUESTS)
    starts = tl.load(query_indptr_ptr + requests, mask=requests < num_requests, other=0) // queries + requests
    request = tl.sum(((requests < num_requests) & (starts <= tl.program_id(0))).to(tl.int32), axis=0) - 1
    begin = tl.load(query_indptr_ptr + request)
    length = tl.load(query_indptr_ptr + request + 1) - begin
    tile_first = (tl.program_id(0) - (begin // queries + request)) * queries
    if (length == 1) | (tile_first >= length):
        return
    context = tl.load(context_lens_ptr + request)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, TILE_D)
    query = tile_first + rows // group
    valid = (rows < queries * group) & (query < length)
    heads = kv_head * group + rows % group
    positions = tl.where(valid, context - length + query, -1)
    inside = valid[:, None] & (dims < D)[None, :]
    line = heads[:, None] * D + dims[None, :]
    token = (begin + query).to(tl.int64)[:, None]
    q = tl.load(q_ptr + token * stride_q_row + line, mask=inside, other=0.0)

    first = 0
    if WINDOW:
        first = tl.maximum(context - length + tile_first + 1 - window, 0)
    last = context - length + tl.minimum(tile_first + queries, length)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, TILE_D], tl.float32)
    for split in range(first // SPLIT, tl.cdiv(last, SPLIT)):
        split_maximum, split_total, split_values = attend(
            q,
            positions,
            tl.maximum(split * SPLIT, first // KEYS * KEYS),
            tl.minimum((split + 1) * SPLIT, last),
            window,
            page_table_ptr + request.to(tl.int64) * stride_page_table_row,
            k_pages_ptr,
            v_pages_ptr,
            k_scales_ptr,
            v_scales_ptr,
            kv_head,
            scale,
            soft_cap,
            G,
            D,
            PAGE,
            ROWS,
            TILE_D,
            KEYS,
            WINDOW,
            SOFT_CAP,
        )
        maximum, total, values = merge(maximum, total, values, split_maximum, split_total, split_values)
    out = normalise(values, total[:, None])
    tl.store(out_ptr + token * (H * D) + line, out.to(out_ptr.dtype.element_ty), mask=inside)


def prefill(
    q: Tensor,
    pages: tuple[Tensor, Tensor, Tensor, Tensor],
    batch: Batch,
    out: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> None:
    """Fill the rows of `out` [T, H, D] of requests of two tokens and more. Arguments checked by paged_attention."""
    num_heads, num_kv_heads, head_dim = q.shape[1], pages[0].shape[1], q.shape[2]
    tile = _tile(pages[0].element_size() == 1, head_dim)
    tiles = q.shape[0] // (tile.rows // (num_heads // num_kv_heads)) + batch.num_requests
    _prefill_kernel[(tiles, num_kv_heads)](
        q,
        *pages,
        batch.page_table,
        batch.query_indptr,
        batch.context_lens,
        out,
        scale,
        soft_cap or 0.0,
        window or 0,
        batch.num_requests,
        q.stride(0),
        batch.page_table.stride(0),
        REQUESTS=max(_LEAST_REQUESTS, triton.next_power_of_2(batch.num_requests)),
        **constexprs(num_heads, num_kv_heads, head_dim, tile.rows, window is not None, soft_cap is not None),
        num_warps=tile.warps(head_dim, pages[0].element_size()),
        num_stages=tile.num_stages(head_dim, pages[0].element_size()),
    )


def _tile(scaled: bool, head_dim: int) -> Tile:
    """Where no target spills. Widening scaled K and V takes registers, so their tile is half as high; at small heads
    it is a deep pipeline that ptxas would trade for spills."""
    if not scaled:
        return Tile(64, 8)
    return Tile(32, 4) if head_dim > 64 else Tile(32, 8, max_stages=1)


def compile_cases(shape: ModelShape, dtype: str) -> list[CompileCase]:
    return attention_split.split_cases(
        "prefill",
        _prefill_kernel,
        shape,
        dtype,
        lambda scaled: _tile(scaled, shape.head_dim),
        {"REQUESTS": _LEAST_REQUESTS},
    )
