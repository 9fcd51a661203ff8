"""Definition of segments.py in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReferenceSegments:
    order: list[int]  # token rows, stable by adapter, base rows last
    seg_indptr: list[int]
    seg_adapter: list[int]
    chunks: list[tuple[int, int, int]]  # (adapter, start in order, length)


def segments(token_adapter: Sequence[int], chunk_rows: int) -> ReferenceSegments:
    active = sorted({adapter for adapter in token_adapter if adapter >= 0})
    order: list[int] = []
    indptr = [0]
    chunks = []
    for adapter in active:
        order += [row for row, other in enumerate(token_adapter) if other == adapter]
        chunks += [
            (adapter, start, min(chunk_rows, len(order) - start)) for start in range(indptr[-1], len(order), chunk_rows)
        ]
        indptr.append(len(order))
    order += [row for row, other in enumerate(token_adapter) if other < 0]
    return ReferenceSegments(order, indptr, active, chunks)
