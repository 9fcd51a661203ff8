"""Kernels run in Triton's CPU interpreter, or on the GPU where TRITON_INTERPRET=0 (`python -m kernels.gpu_check`)."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is imported

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from kernels.reference import segments as reference
from kernels.segments import Segments, build_segments

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


@pytest.fixture(scope="session")
def check_segments(device: torch.device) -> Callable[[list[int], int], None]:
    return lambda token_adapter, chunk_rows: compare_segments(token_adapter, chunk_rows, device)


def compare_segments(token_adapter: list[int], chunk_rows: int, device: torch.device) -> None:
    """Build into buffers larger than needed, full of rubbish, and compare every entry that is promised."""
    count = len(token_adapter)
    out = Segments.allocate(count + 3, device)
    for buffer in (out.order, out.seg_indptr, out.seg_adapter, out.chunk_adapter, out.chunk_start, out.chunk_len):
        buffer.fill_(-7777)
    addresses = [out.order.data_ptr(), out.chunk_adapter.data_ptr()]
    build_segments(torch.tensor(token_adapter, dtype=torch.int32, device=device), chunk_rows, out)
    want = reference.segments(token_adapter, chunk_rows)

    def padded(values: list[int], padding: int, length: int = count) -> list[int]:
        return values + [padding] * (length - len(values))

    assert out.order[:count].tolist() == want.order
    assert out.seg_indptr[: count + 1].tolist() == padded(want.seg_indptr, want.seg_indptr[-1], count + 1)
    assert out.seg_adapter[:count].tolist() == padded(want.seg_adapter, -1)
    assert out.chunk_adapter[:count].tolist() == padded([adapter for adapter, _, _ in want.chunks], -1)
    assert out.chunk_start[:count].tolist() == padded([start for _, start, _ in want.chunks], 0)
    assert out.chunk_len[:count].tolist() == padded([length for _, _, length in want.chunks], 0)
    assert set(out.order[count:].tolist()) == {-7777}  # nothing past the step's rows is written
    assert addresses == [out.order.data_ptr(), out.chunk_adapter.data_ptr()]
