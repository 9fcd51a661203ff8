"""Sampling cells. The floor reads the logits once; right is what the reference draws, up to rounding at a border."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.bench.harness import Cell, Run
from kernels.reference import sampling as reference
from kernels.sampling import sample

# Share of rows that may draw the neighbour of the reference's token: the running sums differ in the last bits.
_BORDER_SHARE = 0.05
CELLS = (  # rows, vocabulary, temperature, top-k, top-p, min-p
    (64, 128256, 0.0, 0, 1.0, 0.0),
    (64, 128256, 1.0, 0, 1.0, 0.0),
    (64, 128256, 0.7, 40, 1.0, 0.0),
    (64, 128256, 0.7, 0, 0.9, 0.0),
    (64, 49152, 0.7, 40, 0.9, 0.02),
)


def _cell(rows: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float) -> Cell:
    def prepare(device: torch.device) -> Run:
        call = (
            2 * torch.randn((rows, vocab), device=device),
            torch.full((rows,), temperature, device=device),
            torch.full((rows,), top_k, dtype=torch.int32, device=device),
            torch.full((rows,), top_p, device=device),
            torch.full((rows,), min_p, device=device),
            torch.randint(1 << 60, (rows,), device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )

        def error() -> float:
            wrong = (sample(*call) != reference.sample(*call)).float().mean().item()
            return wrong / (_BORDER_SHARE if temperature else 1e-9)

        return Run(lambda: sample(*call), error)

    label = f"{rows} rows, V={vocab}, T={temperature} k={top_k} p={top_p} min-p={min_p}"
    return Cell("sample", label, bytes_moved=4 * rows * vocab, flops=0, prepare=prepare)


def cells() -> Iterator[Cell]:
    for cell in CELLS:
        yield _cell(*cell)
