"""RMSNorm cells: x read, residual read and written, result written."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.bench.harness import Cell, Run
from kernels.norm import add_rms_norm
from kernels.reference import norm as reference
from kernels.tolerances import worst_error


def _cell(rows: int, width: int) -> Cell:
    def prepare(device: torch.device) -> Run:
        x, residual = (torch.randn((rows, width), device=device, dtype=torch.bfloat16) for _ in range(2))
        weight = torch.rand(width, device=device, dtype=torch.bfloat16)

        def error() -> float:
            want_residual, got_residual = residual.clone(), residual.clone()
            want = reference.add_rms_norm(x, want_residual, weight, 1e-5)
            got = add_rms_norm(x, got_residual, weight, 1e-5)
            return max(worst_error(got, want), worst_error(got_residual, want_residual))

        return Run(lambda: add_rms_norm(x, residual, weight, 1e-5), error)

    return Cell("add_rms_norm", f"{rows}x{width}", bytes_moved=2 * 4 * rows * width, flops=0, prepare=prepare)


def cells() -> Iterator[Cell]:
    for rows, width in ((64, 4096), (64, 8192), (8192, 4096)):
        yield _cell(rows, width)
