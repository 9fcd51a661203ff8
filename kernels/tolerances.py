"""The one table of tolerances, for tests and benchmarks: how far a kernel may be from its fp32 reference.

Values are taken to be of order 1, as `workloads.py` makes them: an element is right within atol + rtol * |reference|.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE: dict[torch.dtype, tuple[float, float]] = {  # output dtype: (atol, rtol)
    torch.float32: (2e-5, 2e-5),
    torch.float16: (4e-3, 4e-3),
    torch.bfloat16: (3e-2, 3e-2),
}


def worst_error(got: Tensor, want: Tensor) -> float:
    """Largest error as a share of the tolerance of `got`'s dtype: right if <= 1. NaN where either holds one."""
    if got.numel() == 0:
        return 0.0
    atol, rtol = TOLERANCE[got.dtype]
    want = want.float()
    return ((got.float() - want).abs() / (atol + rtol * want.abs())).max().item()
