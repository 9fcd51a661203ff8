"""Drives LlamaModel as the engine does: several requests over scattered pages, in chunks, adapters in a bank."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kernels.layouts import PAGE_SIZE, Batch, KVLayer, LoraLayer, LoraLayers, LoraTables
from kernels.ops import Ops
from model_server.model_config import ModelConfig
from model_server.models.llama import LlamaModel, lora_groups


class PagedRun:
    """Requests are numbered; each has a token list and a place in it. Logits of every computed token are kept."""

    def __init__(self, model: LlamaModel, config: ModelConfig, ops: Ops, num_pages: int = 64) -> None:
        self._model, self._config, self._ops = model, config, ops
        shape = (num_pages, config.num_kv_heads, PAGE_SIZE, config.head_dim)
        # Whatever was never written is poison: reading it shows.
        self.kv = [
            KVLayer(torch.full(shape, float("nan")), torch.full(shape, float("nan"))) for _ in range(config.num_layers)
        ]
        self._free = list(range(num_pages))
        random.Random(7).shuffle(self._free)
        self._pages: dict[int, list[int]] = {}
        self._done: dict[int, int] = {}
        self.logits: dict[int, list[torch.Tensor]] = {}

    def step(
        self,
        work: Sequence[tuple[int, Sequence[int]]],
        adapters: Mapping[int, int] | None = None,
        lora: Sequence[LoraLayers] | None = None,
    ) -> None:
        """Compute `work`: (request, its next tokens), in one batch. `adapters`: request to index in the bank."""
        adapters = adapters or {}
        positions, rows, slots, indptr, contexts = [], [], [], [0], []
        for request, tokens in work:
            pages, start = self._pages.setdefault(request, []), self._done.get(request, 0)
            for position in range(start, start + len(tokens)):
                if position % PAGE_SIZE == 0:
                    pages.append(self._free.pop())
                positions.append(position)
                slots.append(pages[-1] * PAGE_SIZE + position % PAGE_SIZE)
                rows.append(adapters.get(request, -1))
            self._done[request] = start + len(tokens)
            contexts.append(start + len(tokens))
            indptr.append(len(positions))
        width = max(len(self._pages[request]) for request, _ in work)
        table = [self._pages[request] + [-1] * (width - len(self._pages[request])) for request, _ in work]
        batch = Batch(
            *(torch.tensor(values, dtype=torch.int32) for values in (positions, rows, slots, indptr, contexts, table)),
            num_tokens=len(positions),
            num_requests=len(work),
            max_query_len=max(len(tokens) for _, tokens in work),
            max_context_len=max(contexts),
            num_active_adapters=len(set(rows) - {-1}),
        )
        token_ids = torch.tensor([token for _, tokens in work for token in tokens])
        with torch.inference_mode():
            self._ops.plan(batch)
            logits = self._model.forward(token_ids, batch, self.kv, lora, torch.arange(len(positions)))
        for index, (request, _) in enumerate(work):
            self.logits.setdefault(request, []).append(logits[indptr[index] : indptr[index + 1]])

    def run(
        self,
        prompts: Mapping[int, Sequence[int]],
        adapters: Mapping[int, int] | None = None,
        lora: Sequence[LoraLayers] | None = None,
    ) -> dict[int, torch.Tensor]:
        """Feed every prompt in chunks of uneven length, ending in single tokens, requests joining one after another.
        Returns each one's logits [tokens, V]."""
        sizes = (5, 16, 1, 17, 3, 1, 1)
        left = {request: list(tokens) for request, tokens in prompts.items()}
        turn = 0
        while any(left.values()):
            work = []
            for number, (request, tokens) in enumerate(left.items()):
                if tokens and turn >= number:
                    size = sizes[(turn - number) % len(sizes)] if turn - number < len(sizes) else 1
                    work.append((request, [tokens.pop(0) for _ in range(min(size, len(tokens)))]))
            self.step(work, adapters, lora)
            turn += 1
        return {request: torch.cat(parts) for request, parts in self.logits.items()}


def fill_bank(config: ModelConfig, adapters: Sequence[Mapping[str, Any]], scattered: bool) -> list[LoraLayers]:
    """A bank holding `adapters` (as adapter_layout lays them out: group -> a, b, ranks) at indices 0, 1, …; `scattered`
    gives each rows that do not follow each other."""
    layers: list[dict[str, LoraLayer]] = [{} for _ in range(config.num_layers)]
    for group, (in_features, slices) in lora_groups(config).items():
        held = [adapter.get(group) for adapter in adapters]
        counts = [0 if weights is None else weights.a.shape[1] for weights in held]
        order = list(range(sum(counts) + 3))
        if scattered:
            random.Random(3).shuffle(order)
        offsets = [0]
        for _, out_features in slices:
            offsets.append(offsets[-1] + out_features)
        a = torch.full((config.num_layers, len(order), len(slices), in_features), float("nan"))
        b = torch.full((config.num_layers, len(order), offsets[-1]), float("nan"))
        table = torch.full((len(adapters), max(*counts, 1)), -1, dtype=torch.int32)
        ranks = torch.zeros(len(adapters), len(slices), dtype=torch.int32)
        for index, weights in enumerate(held):
            if weights is not None:
                rows = [order.pop() for _ in range(counts[index])]
                rows = rows if scattered else rows[::-1]
                a[:, rows], b[:, rows] = weights.a, weights.b
                table[index, : len(rows)] = torch.tensor(rows)
                ranks[index] = torch.tensor(weights.ranks)
        tables = LoraTables(table, ranks, table.shape[1])
        for layer in range(config.num_layers):
            layers[layer][group] = LoraLayer(a[layer], b[layer], tuple(offsets), tables)
    return [LoraLayers(**groups) for groups in layers]
