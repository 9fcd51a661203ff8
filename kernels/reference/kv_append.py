"""Rotary embedding and the write into pages in plain torch: the definition; and the quantised storage of K and V."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.layouts import PAGE_SIZE, Batch, KVLayer

# Largest stored magnitude: e4m3's largest finite value, and int8 without -128, so that both are symmetric.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
# Keeps the scale of a vector of zeros above zero; vectors below it lose precision, which nothing can see.
SMALLEST_AMAX = 1e-12


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [T, heads, D] fp32 turned by cos_sin [T, D]: pairs are (i, i + D/2)."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., D] -> stored [..., D] of `dtype` (float8_e4m3fn or int8) and fp32 scales [...]: x ≈ stored * scale.

    The scale takes the vector's largest magnitude to the largest stored one. Error per value: at most half a step: for
    int8 scale / 2; for e4m3 2⁻⁴ of the value, or scale * 2⁻¹⁰ below the normal numbers.
    """
    largest = LARGEST[dtype]
    amax = x.float().abs().amax(-1).clamp(min=SMALLEST_AMAX)
    scaled = (x.float() * (largest / amax).unsqueeze(-1)).clamp(-largest, largest)
    stored = scaled.round() if dtype == torch.int8 else scaled
    return stored.to(dtype), amax / largest


def dequantise(stored: Tensor, scales: Tensor | None) -> Tensor:
    """What pages hold, in fp32; `scales` as in KVLayer."""
    values = stored.float()
    return values if scales is None else values * scales.unsqueeze(-1)


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
    """As Ops.kv_append: all arithmetic in fp32, one rounding on the way into qkv and one into the pages."""
    num_kv_heads, head_dim = kv.k_pages.shape[1], kv.k_pages.shape[3]
    heads = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, head_dim))
    q, k, v = (part.float() for part in heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1))
    if q_norm is not None:
        q = _head_norm(q, q_norm, eps)
    if k_norm is not None:
        k = _head_norm(k, k_norm, eps)
    turn = cos_sin[batch.positions.long()]
    view: Tensor = heads[:, :num_heads]
    view.copy_(rotate(q, turn))
    written = batch.slot_mapping >= 0
    slots = batch.slot_mapping[written].long()
    pages, offsets = slots // PAGE_SIZE, slots % PAGE_SIZE
    for new, store, scales in ((rotate(k, turn), kv.k_pages, kv.k_scales), (v, kv.v_pages, kv.v_scales)):
        if scales is None:
            store[pages, :, offsets] = new[written].to(store.dtype)
        else:
            stored, new_scales = quantise(new[written], store.dtype)
            # Indexed assignment does not know float8: both sides go in as bytes.
            store.view(torch.uint8)[pages, :, offsets] = stored.view(torch.uint8)
            scales[pages, :, offsets] = new_scales
    return view


def _head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale: Tensor = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * scale * weight.float()
