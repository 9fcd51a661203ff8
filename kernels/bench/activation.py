"""Gated activation cells: gate and up read, result written."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.activation import act_mul
from kernels.bench.harness import Cell, Run
from kernels.reference import activation as reference
from kernels.tolerances import worst_error


def _cell(rows: int, width: int, activation: str) -> Cell:
    def prepare(device: torch.device) -> Run:
        gate_up = torch.randn((rows, 2 * width), device=device, dtype=torch.bfloat16)
        return Run(
            lambda: act_mul(gate_up, activation),
            lambda: worst_error(act_mul(gate_up, activation), reference.act_mul(gate_up.float(), activation)),
        )

    return Cell("act_mul", f"{activation} {rows}x{width}", bytes_moved=2 * 3 * rows * width, flops=0, prepare=prepare)


def cells() -> Iterator[Cell]:
    for rows, activation in ((64, "silu"), (8192, "silu"), (8192, "gelu_tanh")):
        yield _cell(rows, 14336, activation)
