"""Attention cells: decode by context and batch, prefill by chunk and context. The floor reads K and V of each request once
per step and counts the visible (query, key) pairs' FLOPs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.bench.harness import Cell, Run
from kernels.layouts import PAGE_SIZE, KVLayer
from kernels.paged_attention import paged_attention
from kernels.reference import paged_attention as reference
from kernels.reference.kv_append import quantise
from kernels.tolerances import worst_error
from kernels.workloads import make_batch

LLAMA_8B, LLAMA_70B_SHARE, QWEN3, SMOLLM2 = (32, 8, 128), (8, 1, 128), (16, 8, 128), (9, 3, 64)
CELLS = (  # requests, new tokens of each, context, (H, G, D), storage, window
    (1, 1, 4096, LLAMA_8B, None, None),
    (64, 1, 1024, LLAMA_8B, None, None),
    (64, 1, 4096, LLAMA_8B, None, None),  # the goal: 80 % of peak bandwidth
    (64, 1, 4096, LLAMA_8B, torch.float8_e4m3fn, None),
    (64, 1, 4096, LLAMA_8B, torch.int8, None),
    (64, 1, 4096, LLAMA_8B, None, 1024),
    (16, 1, 32768, LLAMA_8B, None, None),
    (64, 1, 4096, LLAMA_70B_SHARE, None, None),
    (64, 1, 4096, QWEN3, None, None),
    (64, 1, 4096, SMOLLM2, None, None),
    (4, 512, 512, LLAMA_8B, None, None),
    (1, 2048, 2048, LLAMA_8B, None, None),
    (1, 2048, 16384, LLAMA_8B, None, None),
    (1, 2048, 16384, LLAMA_8B, torch.float8_e4m3fn, None),
)


def _pages(batch_pages: int, heads: int, dim: int, storage: torch.dtype | None, device: torch.device) -> KVLayer:
    k, v = (torch.randn((batch_pages, heads, PAGE_SIZE, dim), device=device, dtype=torch.bfloat16) for _ in range(2))
    if storage is None:
        return KVLayer(k, v)
    (k, k_scales), (v, v_scales) = quantise(k, storage), quantise(v, storage)
    return KVLayer(k, v, k_scales, v_scales)


def _cell(
    requests: int,
    length: int,
    context: int,
    shape: tuple[int, int, int],
    storage: torch.dtype | None,
    window: int | None,
) -> Cell:
    heads, kv_heads, dim = shape
    seen = min(context, window + length - 1) if window else context
    vector_bytes = 2 * dim if storage is None else dim + 4
    if window:
        pairs = length * min(window, context)
    else:
        pairs = length * context - length * (length - 1) // 2
    rows = requests * length

    def prepare(device: torch.device) -> Run:
        generator = torch.Generator().manual_seed(torch.seed())
        batch = make_batch([length] * requests, [context] * requests, [-1] * requests, generator, device)
        kv = _pages(requests * -(-context // PAGE_SIZE), kv_heads, dim, storage, device)
        q = torch.randn((rows, heads, dim), device=device, dtype=torch.bfloat16)

        def launch() -> torch.Tensor:
            return paged_attention(q, kv, batch, dim**-0.5, window, None)

        def error() -> float:
            return worst_error(launch(), reference.paged_attention(q.float(), kv, batch, dim**-0.5, window, None))

        return Run(launch, error)

    name = {None: "bf16", torch.int8: "int8", torch.float8_e4m3fn: "e4m3"}[storage]
    label = f"{requests}x{length} at {context}, H={heads} G={kv_heads} D={dim} {name}"
    return Cell(
        "decode attention" if length == 1 else "prefill attention",
        label + (f" window {window}" if window else ""),
        bytes_moved=2 * requests * seen * kv_heads * vector_bytes + 2 * 2 * rows * heads * dim,
        flops=4 * requests * pairs * heads * dim,
        prepare=prepare,
    )


def cells() -> Iterator[Cell]:
    for cell in CELLS:
        yield _cell(*cell)
