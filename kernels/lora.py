"""LoRA for a batch that mixes adapters: y[t, slice s] += (x[t] @ A_s.T) @ B_s, A and B those of token t's adapter.

Two launches per group of slices. Shrink: h[part, t, s, :] = the part-th share along K of x[t] @ A_s.T, in fp32. Expand:
y[t, slice s] += (sum of the parts, in order) @ B_s. Base rows take part in neither: they are never read or written.

One pair of kernels serves two regimes, told apart by tokens per active adapter (`plan_lora`):

- matvec (decode): one program per row, each with its own adapter; no sort, no metadata; weights are read once, K is shared
  out over programs to fill the device. The row sits in a 16-row matrix tile whose other rows load nothing: the matrix unit
  idles anyway in a kernel bound by bandwidth, and its asynchronous copies keep more bytes in flight than plain loads.
- chunked (prefill, shared adapters): one program per chunk of up to 16, 64 or 128 rows of one adapter, none empty; the
  grid is an upper bound of the chunks in use, rounded to a bucket for graph capture; spare programs return at once.

**A row's result does not depend on its neighbours, on the regime or on timing.** That is why the matvec form uses the
matrix unit too: each dot product over K is cut at multiples of BLOCK_K and into parts by K alone, each product over rank
into steps of BLOCK_RANK; a program that owns several parts still sums each on its own and adds them in order; there are
no atomics. Only the number of rows per tile varies, and a row's sum does not see it. (On Hopper, tiles of 64 rows and more
compile to another matrix instruction, wgmma, whose last bit NVIDIA does not promise to equal that of mma.)

True ranks: a rank-r slice loads r rows of A and B, found through the row table; rank 0 ends at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.compile_case import CompileCase, ModelShape, pipeline_stages
from kernels.layouts import Batch, LoraLayer, check, check_index
from kernels.segments import Segments, build_segments

BLOCK_K = 128  # part of the results' bits, as is BLOCK_RANK: never chosen by batch
BLOCK_RANK = 16
BLOCK_N = 128
PART_MIN = 512  # features per part of K, at least
MAX_PARTS = 16
MAX_SLICES = 3
CHUNK_ROWS = (1, 16, 64, 128)  # the regimes; 1 is matvec. The largest leaves K's parts to one program
PROGRAMS_WANTED = 256  # about two per multiprocessor: below that, parts of K go to programs of their own


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """One step's regime and grid, the same for all layers. Chunk c is rows order[start[c] : start[c] + len[c]]."""

    chunk_rows: int  # 1 = matvec: chunk c is row c, and chunk_adapter is the batch's token_adapter
    num_chunks: int  # programs per slice and part: at least the chunks in use
    order: Tensor  # the four are int32 and, for matvec, all token_adapter, of which only chunk_adapter is read
    chunk_adapter: Tensor
    chunk_start: Tensor
    chunk_len: Tensor


@dataclass(frozen=True, slots=True)
class _Tile:
    """How both kernels take token rows, `rows` at a time, and the depth of shrink's pipeline."""

    rows: int
    num_warps: int
    shrink_stages: int


def _tile(chunk_rows: int) -> _Tile:
    if chunk_rows <= 16:
        return _Tile(16, 4, 4)
    return _Tile(64 if chunk_rows <= 64 else 128, 8, 3)


def _expand_stages(tile: _Tile, parts: int) -> int:
    """No pipeline where many rows meet many parts: each part's load would get its buffer, 68 KB at 16 parts."""
    return 1 if tile.rows > 16 and parts > 1 else 3


def _parts(in_features: int) -> tuple[int, int]:
    """(number of parts, features per part): by K alone, so that every batch sums in the same order."""
    wanted = 1
    while wanted < MAX_PARTS and in_features // (2 * wanted) >= PART_MIN:
        wanted *= 2
    features = triton.cdiv(triton.cdiv(in_features, wanted), BLOCK_K) * BLOCK_K
    return triton.cdiv(in_features, features), features


def _rank_tile(max_rank: int) -> int:
    """Shrink's columns. Each is a sum of its own, so this may follow the adapters in use."""
    return 16 if max_rank <= 16 else 64


def chunk_rows_for(num_tokens: int, num_active_adapters: int) -> int:
    """The regime, from tokens per active adapter. Few: a chunk would hold about one row, so each row is a chunk."""
    mean = num_tokens / max(1, num_active_adapters)
    for most, chunk_rows in zip((2, 32, 4096), CHUNK_ROWS, strict=False):
        if mean <= most:
            return chunk_rows
    return CHUNK_ROWS[-1]


def chunk_bound(num_tokens: int, num_active_adapters: int, chunk_rows: int) -> int:
    """Programs that hold every chunk of any such batch, rounded up to a bucket: powers of two, then multiples of 64."""
    most = num_active_adapters + (num_tokens - num_active_adapters) // chunk_rows
    bucket = 1 << (most - 1).bit_length() if most <= 64 else -(-most // 64) * 64
    return min(bucket, num_tokens)


def plan_lora(batch: Batch, buffers: Segments) -> LoraPlan | None:
    """Choose the regime by host facts and, for chunks, build the tables in `buffers`. None: no adapter is active.

    A batch whose `num_active_adapters` is larger than the truth is computed rightly too: a graph captured with
    num_active_adapters = num_tokens serves any batch of that size.
    """
    if batch.num_active_adapters == 0 or batch.num_tokens == 0:
        return None
    active = min(batch.num_active_adapters, batch.num_tokens)
    chunk_rows = chunk_rows_for(batch.num_tokens, active)
    if chunk_rows == 1:
        adapters = batch.token_adapter
        return LoraPlan(1, batch.num_tokens, adapters, adapters, adapters, adapters)
    build_segments(batch.token_adapter, chunk_rows, buffers)
    num_chunks = chunk_bound(batch.num_tokens, active, chunk_rows)
    return LoraPlan(
        chunk_rows, num_chunks, buffers.order, buffers.chunk_adapter, buffers.chunk_start, buffers.chunk_len
    )


@triton.jit
def _chunk_rows(chunk, order_ptr, chunk_start_ptr, chunk_len_ptr, MATVEC: tl.constexpr, BLOCK_M: tl.constexpr):
    """The chunk's token rows [BLOCK_M] and which of them exist."""
    m = tl.arange(0, BLOCK_M)
    if MATVEC:
        live = m < 1
        token = tl.zeros([BLOCK_M], tl.int32) + chunk
    else:
        live = m < tl.load(chunk_len_ptr + chunk)
        token = tl.load(order_ptr + tl.load(chunk_start_ptr + chunk) + m, mask=live, other=0)
    return token, live


@triton.jit
def _shrink_kernel(
    x_ptr,  # [T, K]
    a_ptr,  # [rows, S, K]
    h_ptr,  # [parts in grid, T, S, padded rank] fp32
    order_ptr,
    chunk_adapter_ptr,
    chunk_start_ptr,
    chunk_len_ptr,
    row_table_ptr,
    ranks_ptr,
    in_features,
    num_slices,
    part_features,
    parts_per_program,
    stride_x_row,
    stride_a_row,
    stride_table_row,
    stride_h_part,
    stride_h_row,
    stride_h_slice,
    MATVEC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    chunk = tl.program_id(0)
    slice_index = tl.program_id(1)
    adapter = tl.load(chunk_adapter_ptr + chunk)
    if adapter < 0:
        return
    token, live = _chunk_rows(chunk, order_ptr, chunk_start_ptr, chunk_len_ptr, MATVEC, BLOCK_M)
    rank = tl.load(ranks_ptr + adapter * num_slices + slice_index)
    x_rows = x_ptr + token.to(tl.int64)[:, None] * stride_x_row
    h_rows = h_ptr + tl.program_id(2) * stride_h_part + token[:, None] * stride_h_row
    first_part = tl.program_id(2) * parts_per_program
    for first_rank in range(0, rank, BLOCK_R):
        j = first_rank + tl.arange(0, BLOCK_R)
        rows = tl.load(row_table_ptr + adapter * stride_table_row + j, mask=j < rank, other=0).to(tl.int64)
        a_columns = a_ptr + rows[None, :] * stride_a_row + slice_index * in_features
        total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for part in range(first_part, first_part + parts_per_program):
            acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            first = part * part_features
            for k0 in range(first, tl.minimum(first + part_features, in_features), BLOCK_K):
                k = k0 + tl.arange(0, BLOCK_K)
                x = tl.load(x_rows + k[None, :], mask=live[:, None] & (k < in_features)[None, :], other=0.0)
                a = tl.load(a_columns + k[:, None], mask=(k < in_features)[:, None] & (j < rank)[None, :], other=0.0)
                acc = tl.dot(x, a, acc, input_precision="ieee")
            total += acc
        tl.store(h_rows + slice_index * stride_h_slice + j[None, :], total, mask=live[:, None] & (j < rank)[None, :])


@triton.jit
def _expand_kernel(
    y_ptr,  # [T, N], read and written
    h_ptr,  # [NUM_PARTS, T, S, padded rank] fp32
    b_ptr,  # [rows, N]
    order_ptr,
    chunk_adapter_ptr,
    chunk_start_ptr,
    chunk_len_ptr,
    row_table_ptr,
    ranks_ptr,
    num_slices,
    end_0,  # slice s ends before column end_s; unused ones equal N
    end_1,
    end_2,
    stride_y_row,
    stride_b_row,
    stride_table_row,
    stride_h_part,
    stride_h_row,
    stride_h_slice,
    MATVEC: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    chunk = tl.program_id(0)
    adapter = tl.load(chunk_adapter_ptr + chunk)
    if adapter < 0:
        return
    # Column tiles never straddle slices: count them off slice by slice.
    tile = tl.program_id(1)
    tiles_0 = tl.cdiv(end_0, BLOCK_N)
    tiles_1 = tiles_0 + tl.cdiv(end_1 - end_0, BLOCK_N)
    slice_index = (tile >= tiles_0).to(tl.int32) + (tile >= tiles_1).to(tl.int32)
    tile -= tl.where(tile >= tiles_1, tiles_1, tl.where(tile >= tiles_0, tiles_0, 0))
    slice_start = tl.where(slice_index == 0, 0, tl.where(slice_index == 1, end_0, end_1))
    slice_end = tl.where(slice_index == 0, end_0, tl.where(slice_index == 1, end_1, end_2))
    rank = tl.load(ranks_ptr + adapter * num_slices + slice_index)
    if rank == 0:
        return
    token, live = _chunk_rows(chunk, order_ptr, chunk_start_ptr, chunk_len_ptr, MATVEC, BLOCK_M)
    n = slice_start + tile * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = n < slice_end
    h_rows = h_ptr + token[:, None] * stride_h_row + slice_index * stride_h_slice
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first_rank in range(0, rank, BLOCK_RANK):
        j = first_rank + tl.arange(0, BLOCK_RANK)
        h_mask = live[:, None] & (j < rank)[None, :]
        h = tl.zeros([BLOCK_M, BLOCK_RANK], tl.float32)
        for part in tl.static_range(NUM_PARTS):
            h += tl.load(h_rows + part * stride_h_part + j[None, :], mask=h_mask, other=0.0)
        rows = tl.load(row_table_ptr + adapter * stride_table_row + j, mask=j < rank, other=0).to(tl.int64)
        b = tl.load(
            b_ptr + rows[:, None] * stride_b_row + n[None, :], mask=(j < rank)[:, None] & columns[None, :], other=0.0
        )
        acc = tl.dot(h.to(b.dtype), b, acc, input_precision="ieee")
    y_tile = y_ptr + token.to(tl.int64)[:, None] * stride_y_row + n[None, :]
    y_mask = live[:, None] & columns[None, :]
    y = tl.load(y_tile, mask=y_mask, other=0.0).to(tl.float32)
    tl.store(y_tile, (y + acc).to(y_ptr.dtype.element_ty), mask=y_mask)


def _check(y: Tensor, x: Tensor, layer: LoraLayer) -> None:
    rows, num_slices, in_features = layer.a.shape
    offsets = layer.slice_offsets
    check(x.dim() == 2 and x.shape[1] == in_features, f"x: shape {tuple(x.shape)}, want [T, {in_features}]")
    check(tuple(y.shape) == (x.shape[0], offsets[-1]), f"y: shape {tuple(y.shape)}, want {(x.shape[0], offsets[-1])}")
    check(x.stride(1) == 1 and y.stride(1) == 1, "x, y: features must be contiguous")
    check(num_slices <= MAX_SLICES, f"a: {num_slices} slices, want at most {MAX_SLICES}")
    check(len(offsets) == num_slices + 1, f"slice_offsets: {len(offsets)} entries, want {num_slices + 1}")
    check(offsets[0] == 0 and list(offsets) == sorted(set(offsets)), f"slice_offsets: {offsets} must rise from 0")
    check(tuple(layer.b.shape) == (rows, offsets[-1]), f"b: shape {tuple(layer.b.shape)}, want {(rows, offsets[-1])}")
    check(layer.a.is_contiguous() and layer.b.is_contiguous(), "a, b: must be contiguous")
    for name, tensor in (("a", layer.a), ("b", layer.b)):
        check(tensor.dtype == x.dtype, f"{name}: dtype {tensor.dtype}, want x's {x.dtype}")
    tables = layer.tables
    check_index("row_table", tables.row_table)
    check_index("ranks", tables.ranks, (tables.row_table.shape[0], num_slices))
    check(
        0 <= tables.max_rank <= tables.row_table.shape[1],
        f"max_rank: {tables.max_rank}, row_table holds {tables.row_table.shape[1]}",
    )


def lora(y: Tensor, x: Tensor, layer: LoraLayer, plan: LoraPlan) -> None:
    """Add the batch's LoRA of x [T, K] to y [T, N] in place, T the batch's tokens. Rows may be strided.

    x, a and b share a dtype (bf16, fp16, fp32); y may have another. Sums are fp32; the rank activations are rounded to
    x's dtype between the two products, as an unmerged adapter does.
    """
    _check(y, x, layer)
    tables = layer.tables
    if tables.max_rank == 0:
        return
    num_tokens, in_features = x.shape
    num_slices = layer.a.shape[1]
    tile = _tile(plan.chunk_rows)
    num_parts, part_features = _parts(in_features)
    spread = plan.chunk_rows < CHUNK_ROWS[-1] and plan.num_chunks * num_slices < PROGRAMS_WANTED
    parts_in_grid = num_parts if spread else 1
    padded_rank = triton.cdiv(tables.max_rank, BLOCK_RANK) * BLOCK_RANK
    h = torch.empty((parts_in_grid, num_tokens, num_slices, padded_rank), dtype=torch.float32, device=x.device)
    check(h.numel() < 2**31, f"x: {num_tokens} rows of rank {tables.max_rank} exceed 32-bit offsets")
    chunks = (plan.order, plan.chunk_adapter, plan.chunk_start, plan.chunk_len, tables.row_table, tables.ranks)
    _shrink_kernel[(plan.num_chunks, num_slices, parts_in_grid)](
        x,
        layer.a,
        h,
        *chunks,
        in_features,
        num_slices,
        part_features,
        num_parts // parts_in_grid,
        x.stride(0),
        layer.a.stride(0),
        tables.row_table.stride(0),
        h.stride(0),
        h.stride(1),
        h.stride(2),
        MATVEC=plan.chunk_rows == 1,
        BLOCK_M=tile.rows,
        BLOCK_R=_rank_tile(tables.max_rank),
        BLOCK_K=BLOCK_K,
        num_warps=tile.num_warps,
        num_stages=pipeline_stages(tile.shrink_stages, x.dtype),
    )
    ends = [*layer.slice_offsets[1:], *[layer.slice_offsets[-1]] * (MAX_SLICES - num_slices)]
    num_tiles = sum(
        triton.cdiv(hi - lo, BLOCK_N) for lo, hi in zip(layer.slice_offsets, layer.slice_offsets[1:], strict=False)
    )
    _expand_kernel[(plan.num_chunks, num_tiles)](
        y,
        h,
        layer.b,
        *chunks,
        num_slices,
        *ends,
        y.stride(0),
        layer.b.stride(0),
        tables.row_table.stride(0),
        h.stride(0),
        h.stride(1),
        h.stride(2),
        MATVEC=plan.chunk_rows == 1,
        NUM_PARTS=parts_in_grid,
        BLOCK_M=tile.rows,
        BLOCK_N=BLOCK_N,
        BLOCK_RANK=BLOCK_RANK,
        num_warps=tile.num_warps,
        num_stages=pipeline_stages(_expand_stages(tile, parts_in_grid), x.dtype),
    )


def compile_cases(shape: ModelShape, dtype: str) -> list[CompileCase]:
    """Both regimes of every group of the model, parts in the grid (decode) and in the program (prefill)."""
    indices = ("order_ptr", "chunk_adapter_ptr", "chunk_start_ptr", "chunk_len_ptr", "row_table_ptr", "ranks_ptr")
    index_types = dict.fromkeys(indices, "*i32")
    cases = []
    free = ("num_slices", "parts_per_program", "stride_table_row")
    for chunk_rows, max_rank in ((rows, rank) for rows in CHUNK_ROWS for rank in (16, 64)):
        tile = _tile(chunk_rows)
        cases.append(
            CompileCase(
                f"shrink rows={chunk_rows} rank={max_rank}",
                _shrink_kernel,
                {"x_ptr": f"*{dtype}", "a_ptr": f"*{dtype}", "h_ptr": "*fp32", **index_types},
                {
                    "MATVEC": chunk_rows == 1,
                    "BLOCK_M": tile.rows,
                    "BLOCK_R": _rank_tile(max_rank),
                    "BLOCK_K": BLOCK_K,
                },
                tile.num_warps,
                pipeline_stages(tile.shrink_stages, torch.float16),
                tensor_core=True,
                wide_loads=True,
                unaligned=free,
            )
        )
    num_parts = {_parts(in_features)[0] for in_features, _ in shape.lora_groups.values()}
    forms = {(rows, 1) for rows in CHUNK_ROWS} | {(rows, parts) for rows in CHUNK_ROWS[:-1] for parts in num_parts}
    for chunk_rows, parts in sorted(forms):
        tile = _tile(chunk_rows)
        cases.append(
            CompileCase(
                f"expand rows={chunk_rows} parts={parts}",
                _expand_kernel,
                {"y_ptr": f"*{dtype}", "h_ptr": "*fp32", "b_ptr": f"*{dtype}", **index_types},
                {
                    "MATVEC": chunk_rows == 1,
                    "NUM_PARTS": parts,
                    "BLOCK_M": tile.rows,
                    "BLOCK_N": BLOCK_N,
                    "BLOCK_RANK": BLOCK_RANK,
                },
                tile.num_warps,
                pipeline_stages(_expand_stages(tile, parts), torch.float16),
                tensor_core=True,
                wide_loads=True,
                unaligned=free,
            )
        )
    return cases
