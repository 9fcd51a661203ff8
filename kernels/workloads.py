"""Seeded inputs over the distributions that matter, for tests and benchmarks.

A kernel that is right for one shape is not yet right for a batch of all adapters, of one adapter, of none. Memory that
no kernel may read (rank rows of nobody, rows past a slice's rank, entries past a request's pages) holds NaN or -1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.layouts import BASE, PAGE_SIZE, Batch, LoraLayer, LoraTables

MIXES = ("all_base", "identical", "distinct", "uniform", "skewed", "one_against_rest", "with_base")
MIXED_RANKS = (1, 3, 8, 12, 16, 64, 128)


def assign(mix: str, count: int, generator: torch.Generator) -> list[int]:
    """The adapter index of each of `count` requests (or rows), in shuffled order. Indices run from 0 without gaps.

    uniform: ceil(sqrt(count)) adapters in equal shares; skewed: each next adapter has 1.5 times fewer rows;
    one_against_rest: one row against all others; with_base: every second row is the base model's, the rest distinct.
    """
    if mix == "all_base":
        return [BASE] * count
    if mix == "identical":
        return [0] * count
    if mix == "distinct":
        picked = list(range(count))
    elif mix == "uniform":
        picked = [i % math.ceil(math.sqrt(count)) for i in range(count)]
    elif mix == "skewed":
        picked, share, index = [], max(1.0, count / 3), 0
        while len(picked) < count:
            picked += [index] * min(max(1, round(share)), count - len(picked))
            share, index = share / 1.5, index + 1
    elif mix == "one_against_rest":
        picked = [0] * (count - 1) + [1]
    elif mix == "with_base":
        picked = [i // 2 if i % 2 else BASE for i in range(count)]
    else:
        raise ValueError(f"mix: {mix!r} is none of {MIXES}")
    order = torch.randperm(count, generator=generator)
    return [picked[i] for i in order.tolist()]


def make_batch(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    adapters: Sequence[int],
    generator: torch.Generator,
    device: torch.device | str = "cpu",
    padding_rows: int = 0,
    num_pages: int | None = None,
) -> Batch:
    """A step of requests with `query_lens[r]` new tokens that end a context of `context_lens[r]`, on shuffled pages.

    The pool has `num_pages` (default: just enough). `padding_rows` rows of no request follow, as in a padded CUDA graph.
    """
    pages = [math.ceil(n / PAGE_SIZE) for n in context_lens]
    pool = torch.randperm(num_pages or max(1, sum(pages)), generator=generator).tolist()
    positions: list[int] = []
    token_adapter: list[int] = []
    slots: list[int] = []
    page_table = torch.full((len(pages), max(pages, default=1)), -1, dtype=torch.int32)
    for r, (query, context, adapter) in enumerate(zip(query_lens, context_lens, adapters, strict=True)):
        owned = [pool.pop() for _ in range(pages[r])]
        page_table[r, : len(owned)] = torch.tensor(owned, dtype=torch.int32)
        for position in range(context - query, context):
            positions.append(position)
            token_adapter.append(adapter)
            slots.append(owned[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE)
    num_tokens = len(positions) + padding_rows

    def index(values: Sequence[int], padding: int = 0) -> Tensor:
        return torch.tensor([*values, *[padding] * (num_tokens - len(values))], dtype=torch.int32, device=device)

    indptr = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Batch(
        positions=index(positions),
        token_adapter=index(token_adapter, BASE),
        slot_mapping=index(slots, -1),
        query_indptr=indptr.to(device),
        context_lens=torch.tensor(list(context_lens), dtype=torch.int32, device=device),
        page_table=page_table.to(device),
        num_tokens=num_tokens,
        num_requests=len(query_lens),
        max_query_len=max(query_lens, default=0),
        max_context_len=max(context_lens, default=0),
        num_active_adapters=len(set(token_adapter) - {BASE}),
    )


def decode_batch(mix: str, rows: int, generator: torch.Generator, device: torch.device | str = "cpu") -> Batch:
    """One new token per request, after a context of one: what matters to LoRA alone."""
    return make_batch([1] * rows, [1] * rows, assign(mix, rows, generator), generator, device)


def make_lora_layer(
    ranks: Sequence[Sequence[int]],
    in_features: int,
    slice_features: Sequence[int],
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LoraLayer:
    """A bank holding adapters whose slices have the true `ranks` [adapters][S], in rank rows scattered over the bank.

    `generator` must live on the CPU; the weights are drawn on `device` from its seed.
    """
    rank_table = torch.tensor(ranks, dtype=torch.int32).reshape(len(ranks), len(slice_features))
    rows_of = rank_table.amax(dim=1).tolist() if len(ranks) else []
    total = sum(rows_of) + 5  # some rows are nobody's
    bank = torch.randperm(total, generator=generator).tolist()
    max_rank = max(rows_of, default=0)
    row_table = torch.full((len(ranks), max(1, max_rank)), -1, dtype=torch.int32)
    offsets = [0]
    for features in slice_features:
        offsets.append(offsets[-1] + features)

    device_generator = torch.Generator(device).manual_seed(int(torch.randint(1 << 30, (), generator=generator)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=device_generator, dtype=torch.float32, device=device)

    a = normal(total, len(slice_features), in_features) * in_features**-0.5
    b = normal(total, offsets[-1])
    owned = torch.zeros(total, len(slice_features), dtype=torch.bool)
    for adapter, rows in enumerate(rows_of):
        mine = torch.tensor([bank.pop() for _ in range(rows)], dtype=torch.int64)
        row_table[adapter, :rows] = mine.to(torch.int32)
        for s, rank in enumerate(rank_table[adapter].tolist()):
            owned[mine[:rank], s] = True
            scale = max(1, rank) ** -0.5
            b[mine.to(device), offsets[s] : offsets[s + 1]] *= scale
    unowned = ~owned.to(device)
    a[unowned] = float("nan")
    for s in range(len(slice_features)):
        b[:, offsets[s] : offsets[s + 1]][unowned[:, s]] = float("nan")
    tables = LoraTables(row_table.to(device), rank_table.to(device), max_rank)
    return LoraLayer(a.to(dtype), b.to(dtype), tuple(offsets), tables)


def mixed_ranks(num_adapters: int, num_slices: int, generator: torch.Generator) -> list[list[int]]:
    """True ranks from MIXED_RANKS per adapter; now and then a slice that is not adapted or has a smaller rank."""
    table = []
    for adapter in range(num_adapters):
        rank = MIXED_RANKS[adapter % len(MIXED_RANKS)]
        row = [rank] * num_slices
        if num_slices > 1 and adapter % 3 == 1:
            row[int(torch.randint(num_slices, (), generator=generator))] = rank // 2
        table.append(row)
    return table
