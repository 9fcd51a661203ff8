"""How K and V are stored, seen from inside a kernel: plain values, or INT8 or FP8 (e4m3) with a scale per vector.

Kernels get FP8 pages as bytes (uint8) and convert by bit operations: that works on every GPU (sm_80 has no e4m3
conversion, gfx942's native format is another) and in Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layouts import PAGE_SIZE, KVLayer, check
from kernels.reference.kv_append import SMALLEST_AMAX

_PLAIN = (torch.bfloat16, torch.float16, torch.float32)
_SCALED = (torch.int8, torch.float8_e4m3fn)
_SMALLEST_AMAX = tl.constexpr(SMALLEST_AMAX)
E4M3_FACTOR = tl.constexpr(256.0)  # what scales are multiplied with to go with `widen`
# Scaled storage in a compile case: pointer type -> label.
STORAGE_TYPES = {"*i8": "int8", "*u8": "e4m3"}


@triton.jit
def quantise(a, b, stored_type: tl.constexpr):
    """Both halves of vectors, a and b [rows, D / 2] fp32 -> stored halves, scales [rows] fp32; see the reference.

    stored_type is tl.int8, or tl.uint8 for e4m3.
    """
    largest: tl.constexpr = 127.0 if stored_type == tl.int8 else 448.0
    amax = tl.maximum(tl.max(tl.abs(a), axis=1), tl.max(tl.abs(b), axis=1))
    amax = tl.maximum(amax, _SMALLEST_AMAX)
    inverse = (largest / amax)[:, None]
    a = tl.minimum(tl.maximum(a * inverse, -largest), largest)
    b = tl.minimum(tl.maximum(b * inverse, -largest), largest)
    if stored_type == tl.int8:
        stored_a, stored_b = _to_int8(a), _to_int8(b)
    else:
        stored_a, stored_b = _to_e4m3(a), _to_e4m3(b)
    return stored_a, stored_b, amax / largest


@triton.jit
def _to_int8(x):
    """The nearest integer, ties to even: adding 1.5 * 2²³ leaves no bits below one."""
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def _to_e4m3(x):
    """fp32, |x| <= 448 -> the bits of the nearest e4m3 number, ties to even."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # Normal numbers: exponent bias from 127 to 7, three bits of mantissa kept.
    normal = (magnitude - 0x3C000000 + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    # Below 2⁻⁶: next to 2¹⁴ one unit in the last place of fp32 is one step of e4m3's subnormal numbers.
    subnormal = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    return (sign | tl.where(magnitude < 0x3C800000, subnormal, normal)).to(tl.uint8)


@triton.jit
def widen(stored, dtype: tl.constexpr):
    """Stored values without their scales, in `dtype`, exactly; of e4m3 the 256th part, see E4M3_FACTOR.

    An e4m3 number's bits, moved under fp16's exponent (bias 15 instead of 7), read as 2⁻⁸ of it, subnormal or not.
    """
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.uint16)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(dtype)
    return stored.to(dtype)


def kernel_arguments(kv: KVLayer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k_pages, v_pages, k_scales, v_scales as kernels take them, checked. Pages stand in for absent scales."""
    shape, dtype = kv.k_pages.shape, kv.k_pages.dtype
    check(
        kv.k_pages.dim() == 4 and shape[2] == PAGE_SIZE, f"k_pages: shape {tuple(shape)}, want [P, G, {PAGE_SIZE}, D]"
    )
    check(dtype in _PLAIN + _SCALED, f"k_pages: dtype {dtype} is not one of {_PLAIN + _SCALED}")
    # Offsets are 32-bit: 64-bit ones would cost the attention kernels their registers.
    check(kv.k_pages.numel() < 2**31, f"k_pages: {kv.k_pages.numel()} values in one layer, want fewer than 2³¹")
    for name, pages in (("k_pages", kv.k_pages), ("v_pages", kv.v_pages)):
        check(pages.shape == shape and pages.dtype == dtype, f"{name}: K and V must have one shape and dtype")
        check(pages.is_contiguous(), f"{name}: must be contiguous")
    if dtype in _PLAIN:
        check(kv.k_scales is None and kv.v_scales is None, f"k_scales, v_scales: {dtype} storage has none")
        return kv.k_pages, kv.v_pages, kv.k_pages, kv.v_pages
    check(kv.k_scales is not None and kv.v_scales is not None, f"k_scales, v_scales: {dtype} storage needs them")
    assert kv.k_scales is not None and kv.v_scales is not None  # for the type checker
    for name, scales in (("k_scales", kv.k_scales), ("v_scales", kv.v_scales)):
        check(scales.dtype == torch.float32 and scales.is_contiguous(), f"{name}: want contiguous float32")
        check(scales.shape == shape[:3], f"{name}: shape {tuple(scales.shape)}, want {tuple(shape[:3])}")
    if dtype == torch.float8_e4m3fn:
        return kv.k_pages.view(torch.uint8), kv.v_pages.view(torch.uint8), kv.k_scales, kv.v_scales
    return kv.k_pages, kv.v_pages, kv.k_scales, kv.v_scales
