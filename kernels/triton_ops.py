"""The Triton backend: every operation of kernels/ops.py as a call into its launcher. CUDA, ROCm or the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels import decoder as layers
from kernels.activation import act_mul
from kernels.kv_append import kv_append
from kernels.layouts import Batch, Decoder, KVLayer, LoraLayer, LoraLayers
from kernels.lora import LoraPlan, lora, plan_lora
from kernels.norm import add_rms_norm, rms_norm
from kernels.paged_attention import paged_attention
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
        return linear(x, packed.weight, packed.bias)

    def logits(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return self.linear(x, packed).float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(x, residual, weight, eps)

    def act_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        return act_mul(gate_up, activation)

    def lora(self, y: Tensor, x: Tensor, layer: LoraLayer, batch: Batch) -> None:
        plan = batch.plan["lora"]
        if isinstance(plan, LoraPlan):
            lora(y, x, layer, plan)

    def kv_append(
        self,
        qkv: Tensor,
        num_heads: int,
        cos_sin: Tensor,
        kv: KVLayer,
        batch: Batch,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        return kv_append(qkv, num_heads, cos_sin, kv, batch, q_norm, k_norm, eps)

    def paged_attention(
        self, q: Tensor, kv: KVLayer, batch: Batch, scale: float, window: int | None, soft_cap: float | None
    ) -> Tensor:
        return paged_attention(q, kv, batch, scale, window, soft_cap)

    def decoder(
        self,
        decoder: Decoder,
        hidden: Tensor,
        kv: Sequence[KVLayer],
        lora: Sequence[LoraLayers] | None,
        batch: Batch,
    ) -> Tensor:
        return layers.run(self, decoder, hidden, kv, lora, batch)
