"""Gated activations in plain torch: the definition."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from kernels.layouts import check

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def act_mul(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) * up in fp32, rounded once: gate_up [T, 2I] -> [T, I]; activation one of ACTIVATIONS."""
    check(activation in ACTIVATIONS, f"activation: {activation!r}, want one of {', '.join(ACTIVATIONS)}")
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation == "silu":
        gate = functional.silu(gate)
    else:
        gate = functional.gelu(gate, approximate="none" if activation == "gelu" else "tanh")
    return (gate * up).to(gate_up.dtype)
