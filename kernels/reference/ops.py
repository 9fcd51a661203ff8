"""`Ops` in plain torch, on any device: every operation is its definition. Exact, not fast (kernels.cpu.ops is)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

from kernels import decoder as layers
from kernels.layouts import Batch, Decoder, KVLayer, LoraLayer, LoraLayers
from kernels.reference import activation, kv_append, lora, norm, paged_attention


class ReferenceOps:
    """See `kernels.ops.Ops`."""

    def plan(self, batch: Batch) -> None:
        """The definitions share nothing between layers."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Any:
        return weight, bias

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        return functional.linear(x, *packed)

    def logits(self, x: Tensor, packed: Any) -> Tensor:
        return self.linear(x, packed).float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm.add_rms_norm(x, residual, weight, eps)

    def act_mul(self, gate_up: Tensor, kind: str) -> Tensor:
        return activation.act_mul(gate_up, kind)

    def lora(self, y: Tensor, x: Tensor, layer: LoraLayer, batch: Batch) -> None:
        lora.lora(y, x, layer, batch.token_adapter)

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
        return kv_append.kv_append(qkv, num_heads, cos_sin, kv, batch, q_norm, k_norm, eps)

    def paged_attention(
        self, q: Tensor, kv: KVLayer, batch: Batch, scale: float, window: int | None, soft_cap: float | None
    ) -> Tensor:
        return paged_attention.paged_attention(q, kv, batch, scale, window, soft_cap)

    def decoder(
        self,
        decoder: Decoder,
        hidden: Tensor,
        kv: Sequence[KVLayer],
        lora: Sequence[LoraLayers] | None,
        batch: Batch,
    ) -> Tensor:
        return layers.run(self, decoder, hidden, kv, lora, batch)
