"""LoRA for CPUs, in torch: one pair of small matrix products per adapter and slice, over the adapter's tokens only."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.layouts import BASE, Batch, LoraLayer, LoraTables

# Rows of a tensor: a slice where they are consecutive (a view), else their indices (a copy).
Rows = slice | Tensor


@dataclass(slots=True)
class LoraPlan:
    tokens: dict[int, Rows]  # adapter -> its token rows
    # Per tables: adapter -> its rows of the bank and the rank of each slice.
    owned: dict[int, dict[int, tuple[Rows, list[int]]]] = field(default_factory=dict)


def make_plan(batch: Batch) -> LoraPlan:
    tokens: dict[int, list[int]] = {}
    if batch.num_active_adapters:
        for row, adapter in enumerate(batch.token_adapter.tolist()):
            if adapter != BASE:
                tokens.setdefault(adapter, []).append(row)
    return LoraPlan({adapter: _rows(rows) for adapter, rows in tokens.items()})


def lora(y: Tensor, x: Tensor, layer: LoraLayer, plan: LoraPlan) -> None:
    """As Ops.lora."""
    owned = plan.owned.get(id(layer.tables))
    if owned is None:
        owned = plan.owned[id(layer.tables)] = _owned(layer.tables, list(plan.tokens))
    for adapter, tokens in plan.tokens.items():
        rows, ranks = owned[adapter]
        x_rows, y_rows = x[tokens], y[tokens]
        a, b = layer.a[rows], layer.b[rows]
        for index, rank in enumerate(ranks):
            if rank:
                low, high = layer.slice_offsets[index : index + 2]
                shrunk = x_rows @ a[:rank, index].T
                y_rows[:, low:high].addmm_(shrunk, b[:rank, low:high])
        if isinstance(tokens, Tensor):
            y.index_copy_(0, tokens, y_rows)


def _owned(tables: LoraTables, adapters: list[int]) -> dict[int, tuple[Rows, list[int]]]:
    result: dict[int, tuple[Rows, list[int]]] = {}
    for adapter in adapters:
        ranks = tables.ranks[adapter].tolist()
        result[adapter] = _rows(tables.row_table[adapter, : max(ranks)].tolist()), ranks
    return result


def _rows(rows: list[int]) -> Rows:
    if rows and rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows, dtype=torch.int64)
