"""Batch metadata against its definition, over every distribution and around every tile."""

from collections.abc import Callable

import pytest
import torch

from kernels.segments import Segments, build_segments
from kernels.workloads import MIXES, assign

Check = Callable[[list[int], int], None]


@pytest.mark.parametrize("chunk_rows", [1, 16])
@pytest.mark.parametrize("mix", MIXES)
def test_every_mix(mix: str, chunk_rows: int, check_segments: Check, generator: torch.Generator) -> None:
    check_segments(assign(mix, 70, generator), chunk_rows)


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33])
def test_counts_around_the_tiles(count: int, check_segments: Check) -> None:
    check_segments([i % 3 - 1 for i in range(count)], 16)


def test_more_rows_than_one_scan(check_segments: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.segments.BLOCK_SCAN", 32)
    check_segments([i * 7 % 5 - 1 for i in range(100)], 16)


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    out = Segments.allocate(4, device)
    with pytest.raises(ValueError, match="token_adapter: 5 rows"):
        build_segments(torch.zeros(5, dtype=torch.int32, device=device), 16, out)
    with pytest.raises(ValueError, match="token_adapter: dtype"):
        build_segments(torch.zeros(4, dtype=torch.int64, device=device), 16, out)
    with pytest.raises(ValueError, match="chunk_rows"):
        build_segments(torch.zeros(4, dtype=torch.int32, device=device), 0, out)
