"""LoRA cells: decode and prefill, by adapters in the batch, rank and width. The floor counts each adapter's weights once."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.bench.harness import Cell, Run
from kernels.layouts import BASE
from kernels.lora import lora, plan_lora
from kernels.reference import lora as reference
from kernels.segments import Segments
from kernels.tolerances import worst_error
from kernels.workloads import assign, make_batch, make_lora_layer

GROUPS = {  # input features, output features of each slice; Llama-3-8B
    "4096->4096": (4096, (4096,)),
    "qkv 8B": (4096, (4096, 1024, 1024)),
    "gate_up 8B": (4096, (14336, 14336)),
    "down 8B": (14336, (4096,)),
}
CELLS = (  # rows per request, requests, mix, rank, group
    (1, 1, "identical", 16, "4096->4096"),
    (1, 64, "distinct", 8, "4096->4096"),
    (1, 64, "distinct", 16, "4096->4096"),  # the goal: 60 % of peak bandwidth
    (1, 64, "distinct", 64, "4096->4096"),
    (1, 64, "distinct", 16, "qkv 8B"),
    (1, 64, "distinct", 16, "gate_up 8B"),
    (1, 64, "distinct", 16, "down 8B"),
    (1, 64, "identical", 16, "qkv 8B"),
    (1, 64, "uniform", 16, "qkv 8B"),
    (1, 64, "skewed", 16, "qkv 8B"),
    (1, 64, "with_base", 16, "qkv 8B"),
    (1, 256, "distinct", 16, "qkv 8B"),
    (512, 4, "distinct", 16, "qkv 8B"),
    (512, 4, "identical", 64, "qkv 8B"),
    (32, 64, "uniform", 16, "gate_up 8B"),
)


def _cell(rows: int, requests: int, mix: str, rank: int, group: str) -> Cell:
    in_features, slices = GROUPS[group]
    adapters = assign(mix, requests, torch.Generator().manual_seed(0))
    active = len(set(adapters) - {BASE})
    adapted_rows = rows * sum(adapter != BASE for adapter in adapters)
    weights = active * rank * (len(slices) * in_features + sum(slices))
    activations = adapted_rows * (in_features + 2 * sum(slices))  # x read; y read and written

    def prepare(device: torch.device) -> Run:
        generator = torch.Generator().manual_seed(torch.seed())
        lens = [rows] * requests
        batch = make_batch(lens, lens, adapters, generator, device)
        ranks = [[rank] * len(slices)] * active
        layer = make_lora_layer(ranks, in_features, slices, generator, torch.bfloat16, device)
        x = torch.randn(batch.num_tokens, in_features, device=device, dtype=torch.bfloat16)
        y = torch.randn(batch.num_tokens, sum(slices), device=device, dtype=torch.bfloat16)
        plan = plan_lora(batch, Segments.allocate(batch.num_tokens, device))
        assert plan is not None

        def error() -> float:
            want, got = y.float(), y.clone()
            reference.lora(want, x, layer, batch.token_adapter)
            lora(got, x, layer, plan)
            return worst_error(got, want)

        return Run(lambda: lora(y, x, layer, plan), error)

    return Cell(
        "lora",
        f"{requests}x{rows} rows, {active} adapters {mix}, rank {rank}, {group}",
        bytes_moved=2 * (weights + activations),
        flops=2 * adapted_rows * rank * (len(slices) * in_features + sum(slices)),
        prepare=prepare,
    )


def cells() -> Iterator[Cell]:
    for cell in CELLS:
        yield _cell(*cell)
