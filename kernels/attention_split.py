"""What decode and prefill attention share: the softmax over one split of the keys, and the merge of splits.

The arithmetic of a row depends on its own position alone. Keys are taken in tiles of KEYS and splits of SPLIT, both
counted from position 0 of the request, never from the chunk or the batch; each split starts its softmax afresh, and
splits are merged in order. Decode computes the splits of a row in different programs, prefill one after the other in
one: same additions, same order. So a row's result is the same in any batch, in any chunking, in prefill or decode: bit
for bit where a dot product's result does not depend on the tile's height, as in the interpreter in fp32. Tiles that a
row does not see add exact zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.compile_case import CUDA_LANES, HIP_LANES, HIP_STAGES, LANES, CompileCase, ModelShape
from kernels.kv_storage import E4M3_FACTOR, STORAGE_TYPES, widen
from kernels.layouts import PAGE_SIZE

KEYS = 32  # keys of one tile: with 64 the prefill kernel spills on sm_80 and gfx942
SPLIT = 256  # keys of one split: a whole number of tiles
_STAGE_BYTES = 96 * 1024
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend(
    q,  # [ROWS, TILE_D]
    positions,  # [ROWS] of the queries, -1 = sees nothing
    first,  # key positions, in tiles from `first`, a multiple of KEYS, up to `last`
    last,
    window,
    pages_ptr,  # the request's row of the page table
    k_pages_ptr,  # [P, G, PAGE, D]
    v_pages_ptr,
    k_scales_ptr,  # [P, G, PAGE]
    v_scales_ptr,
    kv_head,
    scale,
    soft_cap,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_D: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Softmax over one split, not yet normalised: maximum (of base-2 scores) and sum [ROWS], values [ROWS, TILE_D]."""
    stored: tl.constexpr = k_pages_ptr.dtype.element_ty
    scaled: tl.constexpr = stored == tl.int8 or stored == tl.uint8
    FACTOR: tl.constexpr = E4M3_FACTOR if stored == tl.uint8 else 1.0
    dims = tl.arange(0, TILE_D)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, TILE_D], tl.float32)
    for start in range(first, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        present = keys < last
        page = tl.load(pages_ptr + keys // PAGE, mask=present, other=0)
        vector = (page * G + kv_head) * PAGE + keys % PAGE
        # Absent keys are read as zero: what their memory holds may be NaN.
        k = tl.load(
            k_pages_ptr + ((vector * D)[None, :] + dims[:, None]), mask=present[None, :] & (dims < D)[:, None], other=0
        )
        v = tl.load(
            v_pages_ptr + ((vector * D)[:, None] + dims[None, :]), mask=present[:, None] & (dims < D)[None, :], other=0
        )
        scores = tl.dot(q, widen(k, q.dtype), input_precision="ieee") * scale
        if scaled:
            scores *= tl.load(k_scales_ptr + vector, mask=present, other=0.0)[None, :] * FACTOR
        if SOFT_CAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1), right at both infinities
            scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * _LOG2E / soft_cap)) + 1.0))
        scores *= _LOG2E
        if WINDOW:  # in one comparison: keys behind the query are negative ages, the largest unsigned ones
            age = positions[:, None] - keys[None, :]
            visible = age.to(tl.uint32, bitcast=True) < tl.cast(window, tl.uint32)
        else:
            visible = keys[None, :] <= positions[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # a row that has seen nothing yet
        weights = tl.exp2(scores - base[:, None])
        keep = tl.exp2(maximum - base)
        total = total * keep + tl.sum(weights, axis=1)
        maximum = new_maximum
        if scaled:
            weights *= tl.load(v_scales_ptr + vector, mask=present, other=0.0)[None, :] * FACTOR
        values = tl.dot(weights.to(q.dtype), widen(v, q.dtype), values * keep[:, None], input_precision="ieee")
    return maximum, total, values


@triton.jit
def merge(maximum, total, values, split_maximum, split_total, split_values):
    """The running softmax with one more split. One that has seen no key changes nothing."""
    new_maximum = tl.maximum(maximum, split_maximum)
    base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    keep, add = tl.exp2(maximum - base), tl.exp2(split_maximum - base)
    total = total * keep + split_total * add
    if len(values.shape) == 2:
        values = values * keep[:, None] + split_values * add[:, None]
    else:
        values = values * keep + split_values * add
    return new_maximum, total, values


@triton.jit
def normalise(values, total):
    """A row that has seen a key has a sum of at least 1; one that has not gives zeros."""
    return values / tl.maximum(total, 1.0)


def constexprs(
    num_heads: int, num_kv_heads: int, head_dim: int, rows: int, window: bool, soft_cap: bool
) -> dict[str, int | bool]:
    """What both kernels are specialised on."""
    return {
        "H": num_heads,
        "G": num_kv_heads,
        "D": head_dim,
        "PAGE": PAGE_SIZE,
        "ROWS": rows,
        "TILE_D": triton.next_power_of_2(head_dim),
        "KEYS": KEYS,
        "SPLIT": SPLIT,
        "WINDOW": window,
        "SOFT_CAP": soft_cap,
    }


class Tile(NamedTuple):
    rows: int
    num_warps: int
    max_stages: int = 3

    def warps(self, head_dim: int, element_size: int, lanes: int = LANES) -> int:
        """`num_warps` holds for 32 lanes. Of AMD's 64 there are no more than a tile of K has 16 bytes for, each lane:
        four for 32 keys of 128 bytes, two for 64 bytes."""
        if lanes == CUDA_LANES:
            return self.num_warps
        tile_bytes = KEYS * triton.next_power_of_2(head_dim) * element_size
        return int(max(1, min(self.num_warps, tile_bytes // (16 * lanes))))

    def num_stages(self, head_dim: int, element_size: int) -> int:
        """Tiles of K and V in flight: as many as shared memory takes."""
        tile_bytes = 2 * KEYS * triton.next_power_of_2(head_dim) * element_size
        stages = max(1, min(self.max_stages, _STAGE_BYTES // tile_bytes))
        return min(stages, HIP_STAGES) if torch.version.hip else int(stages)


def split_cases(
    name: str,
    kernel: Any,
    shape: ModelShape,
    dtype: str,
    tiles: Callable[[bool], Tile],
    extra: dict[str, Any],
) -> list[CompileCase]:
    """Every storage; and plain storage with sliding window and soft cap. `tiles(scaled storage)` chooses."""
    pointer = f"*{dtype}"
    label = f"{name} H={shape.num_heads} G={shape.num_kv_heads} D={shape.head_dim}"
    cases = []
    for pages, options in [(pointer, False), *((pages, False) for pages in STORAGE_TYPES), (pointer, True)]:
        scaled = pages in STORAGE_TYPES
        tile, element_size = tiles(scaled), 1 if scaled else 2
        scales = "*fp32" if scaled else pointer
        types = {"q_ptr": pointer, "out_ptr": pointer, "values_ptr": "*fp32", "stats_ptr": "*fp32"}
        types |= {"k_pages_ptr": pages, "v_pages_ptr": pages, "k_scales_ptr": scales, "v_scales_ptr": scales}
        types |= dict.fromkeys(("page_table_ptr", "query_indptr_ptr", "context_lens_ptr"), "*i32")
        types |= {"scale": "fp32", "soft_cap": "fp32"}
        special = constexprs(shape.num_heads, shape.num_kv_heads, shape.head_dim, tile.rows, options, options)
        cases.append(
            CompileCase(
                label=f"{label} from {STORAGE_TYPES.get(pages, dtype)}{' window cap' if options else ''}",
                kernel=kernel,
                types=types,
                constexprs=special | extra,
                num_warps=tile.warps(shape.head_dim, element_size, CUDA_LANES),
                hip_warps=tile.warps(shape.head_dim, element_size, HIP_LANES),
                num_stages=tile.num_stages(shape.head_dim, element_size),
                tensor_core=True,
                wide_loads=True,
                # Table rows, the request count and the window are whatever they are.
                unaligned=("num_requests", "stride_page_table_row", "window"),
            )
        )
    return cases
