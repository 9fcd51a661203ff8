"""SiLU·mul and GELU·mul. One program per row and tile of columns; gate and up are read once, in wide loads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.compile_case import CompileCase, ModelShape
from kernels.layouts import check
from kernels.reference.activation import ACTIVATIONS

_BLOCK = 2048  # loads of 16 bytes in half precision, for warps of 32 and of 64
_NUM_WARPS = 4


@triton.jit
def _act_mul_kernel(
    gate_up_ptr, out_ptr, width, stride_gate_up_row, stride_out_row, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    gate_at = gate_up_ptr + row * stride_gate_up_row + cols
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + width, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # Both are gate * sigmoid(z): 0.5 * (1 + tanh(a)) = sigmoid(2a).
        z = gate
        if ACTIVATION == "gelu_tanh":
            z = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
        active = gate / (1.0 + tl.exp(-z))
    tl.store(out_ptr + row * stride_out_row + cols, (active * up).to(out_ptr.dtype.element_ty), mask=inside)


def act_mul(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) * up, computed in fp32: gate_up [T, 2I] with contiguous rows -> [T, I]; see ACTIVATIONS."""
    check(activation in ACTIVATIONS, f"activation: {activation!r}, want one of {', '.join(ACTIVATIONS)}")
    check(gate_up.dim() == 2 and gate_up.stride(1) == 1, "gate_up: want [T, 2I] with contiguous rows")
    check(gate_up.shape[1] % 2 == 0, f"gate_up: {gate_up.shape[1]} wide, want gate and up of equal width")
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _act_mul_kernel[(rows, triton.cdiv(width, _BLOCK))](
            gate_up,
            out,
            width,
            gate_up.stride(0),
            out.stride(0),
            ACTIVATION=activation,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )
    return out


def compile_cases(shape: ModelShape, dtype: str) -> list[CompileCase]:
    return [
        CompileCase(
            label=f"act_mul {activation} I={shape.intermediate}",
            kernel=_act_mul_kernel,
            types={"gate_up_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"},
            constexprs={"ACTIVATION": activation, "BLOCK": _BLOCK},
            num_warps=_NUM_WARPS,
            num_stages=1,
            wide_loads=True,
        )
        for activation in ACTIVATIONS
    ]
