"""Decode steps as CUDA graphs: fixed buffers per bucket of batch size and context, captured at first use, then replayed.

A step of n decodes runs in the smallest bucket that holds it; the rest is padding: adapter −1, slot −1, requests of no token.
Off CUDA the same padded buffers run eagerly, so that what a graph would compute is tested without one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.layouts import PAGE_SIZE, Batch
from model_server.batch_tensors import StepTensors

# tokens [T], the step's batch, rows whose logits are wanted [S] -> logits [S, V]
Forward = Callable[[Tensor, Batch, Tensor], Tensor]

_SMALLEST_CONTEXT = 512
_INDEX_FIELDS = ("positions", "token_adapter", "slot_mapping", "query_indptr", "context_lens", "page_table")


@dataclass(frozen=True, slots=True)
class _Bucket:
    """What a captured graph has fixed."""

    size: int  # requests, one token each
    context: int  # longest context in tokens
    adapters: bool
    rank: int  # LoraTables.max_rank at the time of capture


class _Graph:
    """One bucket's buffers and, on CUDA, the captured launches that read them."""

    def __init__(self, bucket: _Bucket, forward: Forward, device: torch.device, pool: Any) -> None:
        size = bucket.size

        def buffer(*shape: int, fill: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        self._token_ids = buffer(size, fill=0, dtype=torch.int64)
        self._batch = Batch(
            positions=buffer(size, fill=0),
            token_adapter=buffer(size, fill=-1),
            slot_mapping=buffer(size, fill=-1),
            query_indptr=buffer(size + 1, fill=0),
            context_lens=buffer(size, fill=0),
            page_table=buffer(size, bucket.context // PAGE_SIZE, fill=-1),
            num_tokens=size,
            num_requests=size,
            max_query_len=1,
            max_context_len=bucket.context,
            # The worst case, each row its own adapter: right for any batch of this size.
            num_active_adapters=size if bucket.adapters else 0,
        )
        self._all_rows = torch.arange(size, device=device)
        self._forward = forward
        self._captured: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor | None = None
        if device.type == "cuda":
            self._capture(pool)

    def _run(self) -> Tensor:
        return self._forward(self._token_ids, self._batch, self._all_rows)

    def _capture(self, pool: Any) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run()  # compiles and tunes what is to be captured
        torch.cuda.current_stream().wait_stream(stream)
        self._captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._captured, pool=pool):
            self._logits = self._run()

    def run(self, step: StepTensors) -> Tensor:
        """Logits [n, V]. Valid until the next run."""
        num_requests = step.batch.num_requests
        self._token_ids[:num_requests].copy_(step.token_ids)
        for name in _INDEX_FIELDS:
            source, target = getattr(step.batch, name), getattr(self._batch, name)
            if name == "query_indptr":  # padding requests begin and end where the last real one ends
                target.fill_(num_requests)
                target[: num_requests + 1].copy_(source)
            elif name == "page_table":
                target[:num_requests, : source.shape[1]].copy_(source)
            else:
                target.fill_(0 if name in ("positions", "context_lens") else -1)
                target[:num_requests].copy_(source)
        if self._captured is None:
            return self._run()[:num_requests]
        self._captured.replay()
        assert self._logits is not None
        return self._logits[:num_requests]


class DecodeGraphs:
    """Owner of the graphs. `context_length` bounds every context; `max_batch` every decode batch worth a graph."""

    def __init__(self, forward: Forward, max_batch: int, context_length: int, device: torch.device) -> None:
        self._forward = forward
        self._max_batch = max_batch
        self._context_length = -(-context_length // PAGE_SIZE) * PAGE_SIZE
        self._device = device
        self._graphs: dict[_Bucket, _Graph] = {}
        # One memory for all: only one graph runs at a time, and its logits are read before the next.
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def takes(self, step: StepTensors) -> bool:
        """Whether the step is all decodes, of a number that a bucket holds."""
        batch = step.batch
        all_sample = step.num_samples == batch.num_requests
        return batch.max_query_len == 1 and batch.num_requests <= self._max_batch and all_sample

    def run(self, step: StepTensors, max_rank: int) -> Tensor:
        """Logits [n, V] of a step that `takes` accepted, row by row. Valid until the next run."""
        batch = step.batch
        context = _SMALLEST_CONTEXT
        while context < batch.max_context_len:
            context *= 4
        adapters = batch.num_active_adapters > 0
        bucket = _Bucket(
            size=min(1 << (batch.num_requests - 1).bit_length(), self._max_batch),
            context=min(context, self._context_length),
            adapters=adapters,
            rank=max_rank if adapters else 0,
        )
        graph = self._graphs.get(bucket)
        if graph is None:
            graph = self._graphs[bucket] = _Graph(bucket, self._forward, self._device, self._pool)
        return graph.run(step)
