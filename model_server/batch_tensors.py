"""From a plan to tensors: one step's chunks as the kernels' Batch. Built in numpy on the host, one copy to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.layouts import Batch
from model_server.runner import Chunk


@dataclass(frozen=True, slots=True)
class StepTensors:
    token_ids: Tensor  # [T] int64
    logit_rows: Tensor  # [S] int64: rows that sample, in chunk order; then those that score prompt tokens, likewise
    num_samples: int  # of these, the first
    batch: Batch


def build(chunks: Sequence[Chunk], page_size: int, device: torch.device) -> StepTensors:
    """Rows stand in the order of `chunks`. Every chunk's pages are already in its request's page_table."""
    lengths = np.array([chunk.length for chunk in chunks], dtype=np.int32)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
    indptr = np.zeros(len(chunks) + 1, dtype=np.int32)
    np.cumsum(lengths, out=indptr[1:])
    num_tokens = int(indptr[-1])
    row_of = np.repeat(np.arange(len(chunks), dtype=np.int32), lengths)
    positions = np.arange(num_tokens, dtype=np.int32) - indptr[row_of] + starts[row_of]
    adapters = np.array([chunk.request.adapter_index for chunk in chunks], dtype=np.int32)

    context_lens = starts + lengths
    num_pages = -(-int(context_lens.max()) // page_size)
    page_table = np.full((len(chunks), num_pages), -1, dtype=np.int32)
    token_ids = np.empty(num_tokens, dtype=np.int64)
    for row, chunk in enumerate(chunks):
        pages = chunk.request.page_table[: -(-(chunk.start + chunk.length) // page_size)]
        page_table[row, : len(pages)] = pages
        token_ids[indptr[row] : indptr[row + 1]] = chunk.request.tokens(chunk.start, chunk.start + chunk.length)
    slots = page_table[row_of, positions // page_size] * page_size + positions % page_size
    rows = [int(indptr[r + 1]) - 1 for r, chunk in enumerate(chunks) if chunk.samples]
    num_samples = len(rows)
    rows += [int(indptr[r]) + p - chunk.start for r, chunk in enumerate(chunks) for p in chunk.scored]
    logit_rows = np.array(rows, dtype=np.int64)

    def to_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    batch = Batch(
        positions=to_device(positions),
        token_adapter=to_device(adapters[row_of]),
        slot_mapping=to_device(slots.astype(np.int32)),
        query_indptr=to_device(indptr),
        context_lens=to_device(context_lens.astype(np.int32)),
        page_table=to_device(page_table),
        num_tokens=num_tokens,
        num_requests=len(chunks),
        max_query_len=int(lengths.max()),
        max_context_len=int(context_lens.max()),
        num_active_adapters=len(set(adapters.tolist()) - {-1}),
    )
    return StepTensors(to_device(token_ids), to_device(logit_rows), num_samples, batch)
