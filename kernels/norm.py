"""RMSNorm, alone or after adding into the residual. One program per row, which it keeps in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.compile_case import CompileCase, ModelShape
from kernels.layouts import check

_MAX_WIDTH = 16384


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,  # read and written when ADD
    weight_ptr,
    out_ptr,
    width,
    stride_x_row,
    stride_residual_row,
    stride_out_row,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    x = tl.load(x_ptr + row * stride_x_row + cols, mask=inside, other=0.0)
    if ADD:
        residual_at = residual_ptr + row * stride_residual_row + cols
        total = x.to(tl.float32) + tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
        x = total.to(residual_ptr.dtype.element_ty)
        tl.store(residual_at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride_out_row + cols, (wide * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x²) + eps) * weight, statistics in fp32: x [T, C] with contiguous rows, weight [C] -> [T, C]."""
    return _launch(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual [T, C] += x [T, C] in place, rounded to its dtype; returns rms_norm of the rounded sum."""
    check(residual.shape == x.shape, f"residual: shape {tuple(residual.shape)}, want {tuple(x.shape)}")
    check(residual.dtype == x.dtype, f"residual: dtype {residual.dtype}, want {x.dtype}")
    check(residual.stride(1) == 1, "residual: rows must be contiguous")
    return _launch(x, residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    check(x.dim() == 2 and x.stride(1) == 1, "x: want [T, C] with contiguous rows")
    rows, width = x.shape
    check(width <= _MAX_WIDTH, f"x: {width} wide, at most {_MAX_WIDTH}")
    check(tuple(weight.shape) == (width,) and weight.is_contiguous(), f"weight: want {width} contiguous values")
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        add_to = x if residual is None else residual
        _rms_norm_kernel[(rows,)](
            x,
            add_to,
            weight,
            out,
            width,
            x.stride(0),
            add_to.stride(0),
            out.stride(0),
            eps,
            ADD=residual is not None,
            BLOCK=block,
            num_warps=_num_warps(block),
        )
    return out


def _num_warps(block: int) -> int:
    """16 elements per thread of a warp of 32, 8 of a warp of 64: loads of 16 bytes in half precision on both."""
    return min(max(block // 512, 1), 16)


def compile_cases(shape: ModelShape, dtype: str) -> list[CompileCase]:
    pointer = f"*{dtype}"
    types = {"x_ptr": pointer, "residual_ptr": pointer, "weight_ptr": pointer, "out_ptr": pointer, "eps": "fp32"}
    block = triton.next_power_of_2(shape.hidden)
    return [
        CompileCase(
            label=f"{'add_' if add else ''}rms_norm C={shape.hidden}",
            kernel=_rms_norm_kernel,
            types=types,
            constexprs={"ADD": add, "BLOCK": block},
            num_warps=_num_warps(block),
            num_stages=1,
            wide_loads=True,
        )
        for add in (False, True)
    ]
