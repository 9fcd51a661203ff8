"""The runner that computes: a model, its KV pages and the adapter bank on one torch device (CPU or CUDA)."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kernels.layouts import PAGE_SIZE, Batch, KVLayer, LoraLayer, LoraLayers, LoraTables
from kernels.ops import Ops
from model_server import batch_tensors
from model_server.adapter_bank import Load
from model_server.adapter_layout import GroupWeights
from model_server.decode_graphs import DecodeGraphs
from model_server.model_config import ModelConfig
from model_server.models.llama import LlamaModel, lora_groups
from model_server.request import Request, Sampling
from model_server.runner import Chunk, RunnerInfo, Sampled, StepResult
from model_server.sampler import Sampler, SamplingOps, with_logprobs

_SMALLEST_RANK = 16
# Kernels address one layer's K or V with 32 bits.
_MAX_LAYER_VALUES = 2**31 - 1
_MAX_NAME = 128
_MEASURED_ROWS = 48


@dataclass(frozen=True, slots=True)
class Memory:
    """What the runner may use for KV pages and the adapter bank, bytes; and how many adapters may be resident."""

    kv_bytes: int
    adapter_bytes: int
    max_adapters: int
    max_rank: int


def kv_bytes_per_page(config: ModelConfig, dtype: torch.dtype) -> int:
    """K and V of PAGE_SIZE tokens over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * PAGE_SIZE * dtype.itemsize


def bank_bytes_per_rank_row(config: ModelConfig, dtype: torch.dtype) -> int:
    """A and B of one rank over all layers and all groups: what rank 1 on every projection costs."""
    elements = sum(
        len(slices) * in_features + sum(out_features for _, out_features in slices)
        for in_features, slices in lora_groups(config).values()
    )
    return config.num_layers * elements * dtype.itemsize


class _Bank:
    """One group's rank rows on the device, all layers, with the tables the kernels read."""

    def __init__(
        self, num_layers: int, num_rows: int, max_adapters: int, max_rank: int, in_features: int,
        out_features: Sequence[int], dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        num_slices = len(out_features)
        # Filled now: an adapter has a part in every layer, so the first one would touch nearly all of the bank's huge pages,
        # and the memory would be taken from the system in the middle of a step.
        self._a = torch.zeros(num_layers, num_rows, num_slices, in_features, dtype=dtype, device=device)
        self._b = torch.zeros(num_layers, num_rows, sum(out_features), dtype=dtype, device=device)
        self._row_table = torch.full((max_adapters, max_rank), -1, dtype=torch.int32, device=device)
        self._ranks = torch.zeros(max_adapters, num_slices, dtype=torch.int32, device=device)
        self._offsets = (0, *np.cumsum(out_features).tolist())

    def write(self, adapter_index: int, rows: Sequence[int], weights: GroupWeights | None) -> None:
        self._row_table[adapter_index] = -1
        if weights is None:
            self._ranks[adapter_index] = 0
            return
        index = torch.tensor(rows, device=self._a.device)
        self._a.index_copy_(1, index, weights.a.to(self._a.device, non_blocking=True))
        self._b.index_copy_(1, index, weights.b.to(self._b.device, non_blocking=True))
        self._row_table[adapter_index, : len(rows)] = index.to(torch.int32)
        self._ranks[adapter_index] = torch.tensor(weights.ranks, dtype=torch.int32, device=self._ranks.device)

    def layers(self, max_rank: int) -> list[LoraLayer]:
        """`max_rank`: at least the largest rank among the adapters in use."""
        tables = LoraTables(self._row_table, self._ranks, max_rank)
        return [LoraLayer(a, b, self._offsets, tables) for a, b in zip(self._a, self._b, strict=True)]


class TorchRunner:
    def __init__(
        self,
        config: ModelConfig,
        model: LlamaModel,
        ops: Ops,
        sampling_ops: SamplingOps,
        *,
        dtype: torch.dtype,
        device: torch.device,
        memory: Memory,
        logits_dir: Path | None = None,
        graph_batch: int = 0,
    ) -> None:
        """`logits_dir`: every sampled row's logits are appended to `<request id>.f32` there, for debugging and for
        tests that compare them. `graph_batch`: decode batches of up to so many requests run as captured graphs
        (decode_graphs.py); 0: none do."""
        self._ops = ops
        self._device = device
        self._model = model
        self._sampler = Sampler(sampling_ops, config.eos_token_ids)
        self._logits_dir = logits_dir
        if logits_dir is not None:
            logits_dir.mkdir(parents=True, exist_ok=True)
        page_bytes, row_bytes = kv_bytes_per_page(config, dtype), bank_bytes_per_rank_row(config, dtype)
        most_pages = _MAX_LAYER_VALUES // (config.num_kv_heads * PAGE_SIZE * config.head_dim)
        num_pages = min(memory.kv_bytes // page_bytes, most_pages)
        num_rows = memory.adapter_bytes // row_bytes
        self._kv = [self._new_pages(config, num_pages, dtype) for _ in range(config.num_layers)]
        max_rank = self._rank_limit = min(memory.max_rank, num_rows)
        groups = lora_groups(config)
        self._banks = {
            group: _Bank(
                config.num_layers, num_rows, memory.max_adapters, max_rank, in_features,
                [out for _, out in slices], dtype, device,
            )
            for group, (in_features, slices) in groups.items()
        }  # fmt: skip
        self._num_layers = config.num_layers
        self._max_rank = 0
        self._lora: list[LoraLayers] = []
        self._set_max_rank(_SMALLEST_RANK)
        context_length = min(config.context_length, num_pages * PAGE_SIZE)
        # Loads ahead go on here while the step computes. On the host both would want the same cores and memory.
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._graphs = DecodeGraphs(self._forward, graph_batch, context_length, device) if graph_batch else None
        self._info = RunnerInfo(
            model_name=config.name,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            kv_bytes=num_pages * page_bytes,
            adapter_bytes=num_rows * row_bytes,
            num_rank_rows=dict.fromkeys(groups, num_rows),
            max_adapters=memory.max_adapters,
            max_rank=max_rank,
            context_length=context_length,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            fixed_rows=self._measure_fixed_rows()
            if device.type == "cpu" and context_length >= _MEASURED_ROWS
            else None,
            loads_ahead=self._copies is not None,
        )

    def _new_pages(self, config: ModelConfig, num_pages: int, dtype: torch.dtype) -> KVLayer:
        # Unlike the bank not filled: slots past a request's context may be read, but are masked.
        shape = (num_pages, config.num_kv_heads, PAGE_SIZE, config.head_dim)
        return KVLayer(
            torch.empty(shape, dtype=dtype, device=self._device), torch.empty(shape, dtype=dtype, device=self._device)
        )

    @torch.inference_mode()
    def _measure_fixed_rows(self) -> float:
        """See RunnerInfo. Prompts of nobody, into pages that nobody has yet."""

        def seconds(rows: int) -> float:
            request = Request("", [0] * rows, Sampling(max_tokens=1), page_table=list(range(-(-rows // PAGE_SIZE))))
            step = batch_tensors.build([Chunk(request, 0, rows, samples=True)], PAGE_SIZE, self._device)
            started_s = time.perf_counter()
            self._forward(step.token_ids, step.batch, step.logit_rows)
            return time.perf_counter() - started_s

        one_s, many_s = (min(seconds(rows) for _ in range(3)) for rows in (1, _MEASURED_ROWS))
        row_s = max(many_s - one_s, 1e-9) / (_MEASURED_ROWS - 1)
        return max(0.0, one_s / row_s - 1)

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def load_adapter(
        self, adapter_index: int, rank_rows: Mapping[str, Sequence[int]], weights: Mapping[str, GroupWeights]
    ) -> None:
        self._join_copies()
        self._write(adapter_index, rank_rows, weights)

    def _write(
        self, adapter_index: int, rank_rows: Mapping[str, Sequence[int]], weights: Mapping[str, GroupWeights]
    ) -> None:
        for group, bank in self._banks.items():
            bank.write(adapter_index, rank_rows.get(group, ()), weights.get(group))
        largest = max((len(rows) for rows in rank_rows.values()), default=0)
        if largest > self._max_rank:
            self._set_max_rank(largest)

    def _set_max_rank(self, rank: int) -> None:
        """Kernels choose tiles by the largest rank seen so far, in powers of two: few values, few graphs."""
        self._max_rank = min(1 << (rank - 1).bit_length(), self._rank_limit)
        groups = {group: bank.layers(self._max_rank) for group, bank in self._banks.items()}
        self._lora = [
            LoraLayers(**{group: layers[index] for group, layers in groups.items()})
            for index in range(self._num_layers)
        ]

    def _join_copies(self) -> None:
        """What the device does from here on comes after the loads ahead given so far."""
        if self._copies is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._copies)

    def _load_ahead(self, load: Load, earlier: torch.cuda.Event | None) -> None:
        """Beside the step that was just launched; after `earlier`, up to which its rows may still be read."""
        if self._copies is None:
            self._write(load.index, load.rows, load.weights)
            return
        assert earlier is not None
        self._copies.wait_event(earlier)
        with torch.cuda.stream(self._copies):
            self._write(load.index, load.rows, load.weights)

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], ahead: Load | None = None) -> StepResult:
        self._join_copies()
        earlier = None
        if ahead is not None and self._copies is not None:
            earlier = torch.cuda.current_stream(self._device).record_event()
        step = batch_tensors.build(chunks, PAGE_SIZE, self._device)
        if self._graphs is not None and self._graphs.takes(step):
            logits = self._graphs.run(step, self._max_rank)
        else:
            logits = self._forward(step.token_ids, step.batch, step.logit_rows)
        if ahead is not None:
            self._load_ahead(ahead, earlier)
        sampling = [chunk.request for chunk in chunks if chunk.samples]
        scored = _score(logits[len(sampling) :], chunks)
        if not sampling:
            return StepResult([None] * len(chunks), scored)
        logits = logits[: len(sampling)]
        if self._logits_dir is not None:
            self._dump(logits, [request.request_id for request in sampling])
        sampled = iter(self._sampler.sample(logits, sampling))
        return StepResult([next(sampled) if chunk.samples else None for chunk in chunks], scored)

    def _forward(self, token_ids: Tensor, batch: Batch, logit_rows: Tensor) -> Tensor:
        self._ops.plan(batch)
        return self._model.forward(token_ids, batch, self._kv, self._lora, logit_rows)

    def _dump(self, logits: Tensor, request_ids: Sequence[str]) -> None:
        assert self._logits_dir is not None
        for row, request_id in zip(logits.float().cpu().numpy(), request_ids, strict=True):
            # Request ids are the callers' words: not a path.
            name = re.sub(r"[^\w.-]", "_", request_id).lstrip(".")[:_MAX_NAME]
            with (self._logits_dir / f"{name}.f32").open("ab") as file:
                file.write(row.tobytes())


def _score(logits: Tensor, chunks: Sequence[Chunk]) -> dict[int, list[Sampled]]:
    """`logits` [rows, V] of the chunks' scored positions, in order."""
    scored: dict[int, list[Sampled]] = {}
    row = 0
    for index, chunk in enumerate(chunks):
        num_top = chunk.request.sampling.prompt_logprobs
        if num_top is not None and chunk.scored:
            next_ids = [chunk.request.prompt_ids[position + 1] for position in chunk.scored]
            rows = logits[row : row + len(next_ids)]
            scored[index] = [with_logprobs(line, token, num_top) for line, token in zip(rows, next_ids, strict=True)]
            row += len(next_ids)
    return scored
