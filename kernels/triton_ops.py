"""The Triton backend: every operation of kernels/ops.py as a call into its launcher. CUDA, ROCm or the interpreter."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.layouts import Batch, LoraLayer
from kernels.lora import LoraPlan, lora, plan_lora
from kernels.segments import Segments


class PackedLinear(NamedTuple):
    weight: Tensor  # [N, K]
    bias: Tensor | None


class TritonOps:
    """Holds the step metadata's buffers, so that their addresses stay what a captured CUDA graph saw."""

    def __init__(self, max_tokens: int, device: torch.device | str) -> None:
        self._segments = Segments.allocate(max_tokens, device)

    def plan(self, batch: Batch) -> None:
        batch.plan["lora"] = plan_lora(batch, self._segments)

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return PackedLinear(weight, bias)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return F.linear(x, packed.weight, packed.bias)

    def lora(self, y: Tensor, x: Tensor, layer: LoraLayer, batch: Batch) -> None:
        plan = batch.plan["lora"]
        if isinstance(plan, LoraPlan):
            lora(y, x, layer, plan)
