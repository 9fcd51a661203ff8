"""KV append cells. The floor: the row is read once, q written back, k and v written into pages; cos and sin in fp32."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.bench.harness import Cell, Run
from kernels.kv_append import kv_append
from kernels.layouts import PAGE_SIZE, KVLayer
from kernels.reference import kv_append as reference
from kernels.tolerances import worst_error
from kernels.workloads import make_batch

CELLS = (  # rows, (H, G, D), q and k norm, storage
    (64, (32, 8, 128), False, None),
    (64, (16, 8, 128), True, None),
    (64, (32, 8, 128), False, torch.float8_e4m3fn),
    (8192, (32, 8, 128), False, None),
    (8192, (32, 8, 128), False, torch.float8_e4m3fn),
    (8192, (32, 8, 128), False, torch.int8),
)


def _pages(shape: tuple[int, ...], storage: torch.dtype | None, device: torch.device) -> KVLayer:
    if storage is None:
        return KVLayer(*(torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2)))
    k, v = (torch.zeros(shape, dtype=torch.int8, device=device).view(storage) for _ in range(2))
    return KVLayer(k, v, *(torch.zeros(shape[:3], device=device) for _ in range(2)))


def _cell(rows: int, shape: tuple[int, int, int], normed: bool, storage: torch.dtype | None) -> Cell:
    heads, kv_heads, dim = shape
    vector_bytes = 2 * dim if storage is None else dim + 4

    def prepare(device: torch.device) -> Run:
        generator = torch.Generator().manual_seed(torch.seed())
        batch = make_batch([1] * rows, [PAGE_SIZE] * rows, [-1] * rows, generator, device)
        qkv = torch.randn((rows, (heads + 2 * kv_heads) * dim), device=device, dtype=torch.bfloat16)
        cos_sin = torch.randn((128, dim), device=device)
        weight = torch.ones(dim, device=device, dtype=torch.bfloat16) if normed else None
        page_shape = (int(batch.page_table.max()) + 1, kv_heads, PAGE_SIZE, dim)
        kv = _pages(page_shape, storage, device)

        def launch(rows: torch.Tensor = qkv) -> torch.Tensor:
            return kv_append(rows, heads, cos_sin, kv, batch, weight, weight, 1e-5)

        def error() -> float:
            want = _pages(page_shape, storage, device)
            want_q = reference.kv_append(qkv.float(), heads, cos_sin, want, batch, weight, weight, 1e-5)
            got_q = launch(qkv.clone())
            pairs = [(got_q, want_q)]
            for ours, scales, theirs, their_scales in (
                (kv.k_pages, kv.k_scales, want.k_pages, want.k_scales),
                (kv.v_pages, kv.v_scales, want.v_pages, want.v_scales),
            ):
                # A rounding border may lie between the two: then they differ by a step, which bf16's tolerance covers
                # for int8, and for e4m3 at the size of its values.
                got = reference.dequantise(ours, scales)
                step = 0.0 if scales is None else 0.14 if storage == torch.float8_e4m3fn else 0.02
                off = (got - reference.dequantise(theirs, their_scales)).abs() / (1 + got.abs())
                pairs.append(((off - step).clamp(min=0).bfloat16(), torch.zeros_like(off)))
            return max(worst_error(*pair) for pair in pairs)

        return Run(launch, error)

    name = {None: "bf16", torch.int8: "int8", torch.float8_e4m3fn: "e4m3"}[storage]
    return Cell(
        "kv_append",
        f"{rows} rows, H={heads} G={kv_heads} D={dim} into {name}{', q/k norm' if normed else ''}",
        bytes_moved=rows * (2 * (2 * heads + 2 * kv_heads) * dim + 4 * dim + 2 * kv_heads * vector_bytes),
        flops=0,
        prepare=prepare,
    )


def cells() -> Iterator[Cell]:
    for cell in CELLS:
        yield _cell(*cell)
