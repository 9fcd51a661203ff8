"""Rotary embedding, optional per-head q and k norm, and the write of K and V into pages, in one kernel.

One program per token and tile of heads; a tile may hold heads of q, k and v at once. A token's row is read once, and
everything between that and the stores stays in registers. The two halves of a head, which rotate into each other, are
two tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.compile_case import CUDA_LANES, HIP_LANES, LANES, CompileCase, ModelShape
from kernels.kv_storage import STORAGE_TYPES, kernel_arguments, quantise
from kernels.layouts import PAGE_SIZE, Batch, KVLayer, check, check_index

_TILE_ELEMENTS = 2048  # of a program, at most
_LANE_ELEMENTS = 16  # two loads of 16 bytes in half precision


@triton.jit
def _kv_append_kernel(
    qkv_ptr,  # [T, (H + 2G) * D]
    cos_sin_ptr,  # [max position, D] fp32
    positions_ptr,
    slot_mapping_ptr,
    k_pages_ptr,  # [P, G, PAGE, D]
    v_pages_ptr,
    k_scales_ptr,  # [P, G, PAGE] fp32
    v_scales_ptr,
    q_norm_ptr,  # [D]
    k_norm_ptr,
    eps,
    stride_qkv_row,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_HALF: tl.constexpr,  # D / 2, rounded up to a power of two
):
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS))[:, None]
    is_q = heads < H
    is_k = (heads >= H) & (heads < H + G)
    is_v = (heads >= H + G) & (heads < H + 2 * G)
    dims = tl.arange(0, TILE_HALF)[None, :]
    inside = dims < D // 2
    loaded = inside & (heads < H + 2 * G)
    a_at = qkv_ptr + token * stride_qkv_row + heads * D + dims
    b_at = a_at + D // 2
    a = tl.load(a_at, mask=loaded, other=0.0).to(tl.float32)
    b = tl.load(b_at, mask=loaded, other=0.0).to(tl.float32)

    if Q_NORM or K_NORM:
        mean = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / D
        scale = tl.rsqrt(mean + eps)[:, None]
        if Q_NORM:
            a = tl.where(is_q, a * scale * tl.load(q_norm_ptr + dims, mask=inside, other=0.0), a)
            b = tl.where(is_q, b * scale * tl.load(q_norm_ptr + D // 2 + dims, mask=inside, other=0.0), b)
        if K_NORM:
            a = tl.where(is_k, a * scale * tl.load(k_norm_ptr + dims, mask=inside, other=0.0), a)
            b = tl.where(is_k, b * scale * tl.load(k_norm_ptr + D // 2 + dims, mask=inside, other=0.0), b)

    turn_at = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * D + dims
    cos = tl.where(is_v, 1.0, tl.load(turn_at, mask=inside, other=0.0))
    sin = tl.where(is_v, 0.0, tl.load(turn_at + D // 2, mask=inside, other=0.0))
    a, b = a * cos - b * sin, b * cos + a * sin
    tl.store(a_at, a.to(qkv_ptr.dtype.element_ty), mask=is_q & inside)
    tl.store(b_at, b.to(qkv_ptr.dtype.element_ty), mask=is_q & inside)

    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    kv_head = tl.where(is_v, heads - H - G, heads - H)
    vector = ((slot // PAGE).to(tl.int64) * G + kv_head) * PAGE + slot % PAGE
    at = vector * D + dims
    stored_type: tl.constexpr = k_pages_ptr.dtype.element_ty
    if stored_type == tl.int8 or stored_type == tl.uint8:
        stored_a, stored_b, scales = quantise(a, b, stored_type)
        tl.store(k_scales_ptr + vector, scales[:, None], mask=is_k)
        tl.store(v_scales_ptr + vector, scales[:, None], mask=is_v)
    else:
        stored_a, stored_b = a.to(stored_type), b.to(stored_type)
    tl.store(k_pages_ptr + at, stored_a, mask=is_k & inside)
    tl.store(k_pages_ptr + at + D // 2, stored_b, mask=is_k & inside)
    tl.store(v_pages_ptr + at, stored_a, mask=is_v & inside)
    tl.store(v_pages_ptr + at + D // 2, stored_b, mask=is_v & inside)


def kv_append(
    qkv: Tensor,
    num_heads: int,
    cos_sin: Tensor,
    kv: KVLayer,
    batch: Batch,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """Normalise q and k per head where asked, rotate them, write k and v into their slots; q changes in place.

    As Ops.kv_append. qkv [T, (H + 2G) * D] bf16, fp16 or fp32, rows contiguous; a slot of -1 writes nothing. Every slot
    stands at most once in a step. Returns q [T, H, D], a view of qkv.
    """
    pages = kernel_arguments(kv)
    num_kv_heads, head_dim = kv.k_pages.shape[1], kv.k_pages.shape[3]
    total = num_heads + 2 * num_kv_heads
    check(head_dim % 2 == 0, f"k_pages: head size {head_dim}, want an even one")
    check(qkv.dim() == 2 and qkv.stride(1) == 1, "qkv: want [T, (H + 2G) * D] with contiguous rows")
    check(qkv.shape[1] == total * head_dim, f"qkv: {qkv.shape[1]} wide, want {total * head_dim}")
    check(cos_sin.dtype == torch.float32 and cos_sin.is_contiguous(), "cos_sin: want contiguous float32")
    check(cos_sin.dim() == 2 and cos_sin.shape[1] == head_dim, f"cos_sin: want [max position, {head_dim}]")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        check(weight is None or tuple(weight.shape) == (head_dim,), f"{name}: want {head_dim} values")
    check_index("positions", batch.positions, (qkv.shape[0],))
    check_index("slot_mapping", batch.slot_mapping, (qkv.shape[0],))
    heads, half = _tile(total, head_dim)
    if qkv.shape[0]:
        _kv_append_kernel[(qkv.shape[0], triton.cdiv(total, heads))](
            qkv,
            cos_sin,
            batch.positions,
            batch.slot_mapping,
            *pages,
            qkv if q_norm is None else q_norm,
            qkv if k_norm is None else k_norm,
            eps,
            qkv.stride(0),
            H=num_heads,
            G=num_kv_heads,
            D=head_dim,
            PAGE=PAGE_SIZE,
            Q_NORM=q_norm is not None,
            K_NORM=k_norm is not None,
            TILE_HEADS=heads,
            TILE_HALF=half,
            num_warps=_num_warps(heads, half, LANES),
        )
    q: Tensor = qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))
    return q


def _tile(total_heads: int, head_dim: int) -> tuple[int, int]:
    half = triton.next_power_of_2(head_dim // 2)
    return min(triton.next_power_of_2(total_heads), max(_TILE_ELEMENTS // (2 * half), 1)), half


def _num_warps(heads: int, half: int, lanes: int) -> int:
    return max(heads * 2 * half // (_LANE_ELEMENTS * lanes), 1)


def compile_cases(shape: ModelShape, dtype: str) -> list[CompileCase]:
    heads, half = _tile(shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    pointer = f"*{dtype}"
    cases = []
    for pages, label in {pointer: dtype, **STORAGE_TYPES}.items():
        scales = "*fp32" if pages != pointer else pointer
        types = dict.fromkeys(("qkv_ptr", "q_norm_ptr", "k_norm_ptr"), pointer)
        types |= {"k_pages_ptr": pages, "v_pages_ptr": pages, "k_scales_ptr": scales, "v_scales_ptr": scales}
        types |= {"cos_sin_ptr": "*fp32", "positions_ptr": "*i32", "slot_mapping_ptr": "*i32", "eps": "fp32"}
        constexprs = {"H": shape.num_heads, "G": shape.num_kv_heads, "D": shape.head_dim, "PAGE": PAGE_SIZE}
        constexprs |= {"Q_NORM": shape.qk_norm, "K_NORM": shape.qk_norm, "TILE_HEADS": heads, "TILE_HALF": half}
        cases.append(
            CompileCase(
                label=f"kv_append H={shape.num_heads} G={shape.num_kv_heads} D={shape.head_dim} into {label}",
                kernel=_kv_append_kernel,
                types=types,
                constexprs=constexprs,
                num_warps=_num_warps(heads, half, CUDA_LANES),
                hip_warps=_num_warps(heads, half, HIP_LANES),
                num_stages=1,
                wide_loads=True,
            )
        )
    return cases
