"""Decode attention: requests of one new token, split over the sequence, then combined in order.

The query heads of a K/V head are the rows of one matrix product, padded to 16. A matrix-vector form would need
2 * group FLOPs per loaded element from the vector units, half of their rate at group 8 and full bandwidth; for tensor
cores even the padded product is under a tenth of theirs. K and V are read once per group either way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import attention_split
from kernels.attention_split import SPLIT, Tile, attend, constexprs, merge, normalise
from kernels.compile_case import CompileCase, ModelShape
from kernels.layouts import Batch

_COMBINE_AT_ONCE = 8  # splits whose loads are issued together


@triton.jit
def _decode_kernel(
    q_ptr,  # [T, H, D]
    k_pages_ptr,
    v_pages_ptr,
    k_scales_ptr,
    v_scales_ptr,
    page_table_ptr,
    query_indptr_ptr,
    context_lens_ptr,
    out_ptr,  # [T, H, D], written when SINGLE
    values_ptr,  # [R, H, pieces, D] fp32, written when not SINGLE
    stats_ptr,  # [R, H, pieces, 2] fp32: maximum and sum
    scale,
    soft_cap,
    window,
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
    SINGLE: tl.constexpr,
):
    request, kv_head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(query_indptr_ptr + request)
    if tl.load(query_indptr_ptr + request + 1) - token != 1:
        return
    context = tl.load(context_lens_ptr + request)
    first = 0
    if WINDOW:
        first = tl.maximum(context - window, 0)
    split = first // SPLIT + piece
    if split * SPLIT >= context:
        return
    group: tl.constexpr = H // G
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, TILE_D)
    heads = kv_head * group + rows
    inside = (rows < group)[:, None] & (dims < D)[None, :]
    line = heads[:, None] * D + dims[None, :]
    q = tl.load(q_ptr + token.to(tl.int64) * stride_q_row + line, mask=inside, other=0.0)
    maximum, total, values = attend(
        q,
        tl.where(rows < group, context - 1, -1),
        tl.maximum(split * SPLIT, first // KEYS * KEYS),
        tl.minimum((split + 1) * SPLIT, context),
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
    if SINGLE:
        out = normalise(values, total[:, None])
        tl.store(out_ptr + token.to(tl.int64) * (H * D) + line, out.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        at = (request.to(tl.int64) * H + heads) * tl.num_programs(2) + piece
        tl.store(values_ptr + at[:, None] * D + dims[None, :], values, mask=inside)
        tl.store(stats_ptr + at * 2, maximum, mask=rows < group)
        tl.store(stats_ptr + at * 2 + 1, total, mask=rows < group)


@triton.jit
def _combine_kernel(
    values_ptr,
    stats_ptr,
    query_indptr_ptr,
    context_lens_ptr,
    out_ptr,
    window,
    pieces,
    H: tl.constexpr,
    D: tl.constexpr,
    TILE_D: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    request, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_indptr_ptr + request)
    if tl.load(query_indptr_ptr + request + 1) - token != 1:
        return
    context = tl.load(context_lens_ptr + request)
    first = 0
    if WINDOW:
        first = tl.maximum(context - window, 0)
    count = tl.cdiv(context, SPLIT) - first // SPLIT
    dims = tl.arange(0, TILE_D)
    at = (request.to(tl.int64) * H + head) * pieces
    maximum, total = float("-inf"), 0.0
    values = tl.zeros([TILE_D], tl.float32)
    for start in range(0, count, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            here = start + i < count
            split_at = at + start + i
            split_values = tl.load(values_ptr + split_at * D + dims, mask=dims < tl.where(here, D, 0), other=0.0)
            split_maximum = tl.load(stats_ptr + split_at * 2, mask=here, other=float("-inf"))
            split_total = tl.load(stats_ptr + split_at * 2 + 1, mask=here, other=0.0)
            maximum, total, values = merge(maximum, total, values, split_maximum, split_total, split_values)
    out_at = out_ptr + (token.to(tl.int64) * H + head) * D + dims
    tl.store(out_at, normalise(values, total).to(out_ptr.dtype.element_ty), mask=dims < D)


def decode(
    q: Tensor,
    pages: tuple[Tensor, Tensor, Tensor, Tensor],
    batch: Batch,
    out: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> None:
    """Fill the rows of `out` [T, H, D] that belong to requests of one token. Arguments checked by paged_attention."""
    num_heads, num_kv_heads, head_dim = q.shape[1], pages[0].shape[1], q.shape[2]
    tile = _tile(num_heads // num_kv_heads)
    pieces = triton.cdiv(batch.max_context_len, SPLIT)
    if window is not None:  # a window touches at most one split more than it fills
        pieces = min(pieces, triton.cdiv(window, SPLIT) + 1)
    single = pieces == 1  # merging one split with nothing would give the same bits
    values = stats = out
    if not single:
        shape = (batch.num_requests, num_heads, pieces)
        values = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
    _decode_kernel[(batch.num_requests, num_kv_heads, pieces)](
        q,
        *pages,
        batch.page_table,
        batch.query_indptr,
        batch.context_lens,
        out,
        values,
        stats,
        scale,
        soft_cap or 0.0,
        window or 0,
        q.stride(0),
        batch.page_table.stride(0),
        SINGLE=single,
        **constexprs(num_heads, num_kv_heads, head_dim, tile.rows, window is not None, soft_cap is not None),
        num_warps=tile.warps(head_dim, pages[0].element_size()),
        num_stages=tile.num_stages(head_dim, pages[0].element_size()),
    )
    if not single:
        _combine_kernel[(batch.num_requests, num_heads)](
            values,
            stats,
            batch.query_indptr,
            batch.context_lens,
            out,
            window or 0,
            pieces,
            H=num_heads,
            D=head_dim,
            TILE_D=triton.next_power_of_2(head_dim),
            SPLIT=SPLIT,
            WINDOW=window is not None,
            AT_ONCE=_COMBINE_AT_ONCE,
            num_warps=1,
        )


def _tile(group: int) -> Tile:
    return Tile(rows=int(max(16, triton.next_power_of_2(group))), num_warps=4)


def compile_cases(shape: ModelShape, dtype: str) -> list[CompileCase]:
    combine = CompileCase(
        label=f"combine H={shape.num_heads} D={shape.head_dim}",
        kernel=_combine_kernel,
        types={
            "values_ptr": "*fp32",
            "stats_ptr": "*fp32",
            "query_indptr_ptr": "*i32",
            "context_lens_ptr": "*i32",
            "out_ptr": f"*{dtype}",
        },
        constexprs={
            "H": shape.num_heads,
            "D": shape.head_dim,
            "TILE_D": triton.next_power_of_2(shape.head_dim),
            "SPLIT": SPLIT,
            "WINDOW": False,
            "AT_ONCE": _COMBINE_AT_ONCE,
        },
        num_warps=1,
        num_stages=1,
        unaligned=("pieces",),
    )
    tile = _tile(shape.num_heads // shape.num_kv_heads)
    extra = {"SINGLE": False}
    return [
        *attention_split.split_cases("decode", _decode_kernel, shape, dtype, lambda _: tile, extra),
        combine,
    ]
