"""Kernels run in Triton's CPU interpreter, or on the GPU where TRITON_INTERPRET=0 (`python -m kernels.gpu_check`)."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is imported

from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

torch.set_num_threads(1)
INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"


def dot_in_order(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """The interpreter's `tl.dot`, summing as hardware does: in one order, wherever a row sits in its tile.

    The original is numpy's matmul, that is BLAS, whose order of summation (hence the last bits) depends on the tile's
    shape and on the row's place in it. Matrix units know no such dependence, so tests of bit equality need a product
    without it: here each element is the sum over k in ascending order.
    """
    left = a.data.astype(d.data.dtype)
    right = b.data.astype(d.data.dtype)
    total = np.zeros(d.data.shape, d.data.dtype)
    for k in range(left.shape[-1]):
        total += left[..., :, k, None] * right[..., k, None, :]
    return interpreter.TensorHandle(total + d.data, d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = dot_in_order


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    """Seeded by the test's own name: every case has its inputs, each run the same ones."""
    return torch.Generator().manual_seed(sum(request.node.name.encode()))
