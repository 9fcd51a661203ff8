"""The set of operations a model's forward pass is written in. Three backends implement it under the same names:

    kernels.reference.ops   plain torch, any device: the definition
    kernels.triton_ops      Triton, CUDA/ROCm (and the interpreter)
    kernels.cpu.ops         native CPU kernels and prepacked linears

Nothing else in the engine knows which one runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from kernels.layouts import Batch, Decoder, KVLayer, LoraLayer, LoraLayers


class Ops(Protocol):
    def plan(self, batch: Batch) -> None:
        """Derive what all layers share (segments, chunks, splits) into `batch.plan`. Once per step, no host sync."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Any:
        """`weight` [N, K] in the compute dtype, laid out for `linear`. May keep the only copy of the weight."""

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        """x [T, K] -> [T, N]."""

    def logits(self, x: Tensor, packed: Any) -> Tensor:
        """As `linear`, in fp32: x [S, C] -> [S, V]. Rounded as `linear` first, then widened, where the backend has no
        product with a wider result."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x * rsqrt(mean(x²) + eps) * weight, statistics in fp32. x [T, C]."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x in place; returns rms_norm(residual)."""

    def act_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """gate_up [T, 2I] -> act(gate) * up [T, I]; activation "silu", "gelu" or "gelu_tanh"."""

    def lora(self, y: Tensor, x: Tensor, layer: LoraLayer, batch: Batch) -> None:
        """y [T, N] += LoRA of x [T, K], in place; rows of the base model are not touched."""

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
        """Optional per-head RMSNorm of q and k, rotary embedding (half-split), write k and v into their slots.

        qkv [T, (H + 2G) * D]; cos_sin [max position, D] fp32: cos in the first half, sin in the second. Returns q
        [T, H, D] rotated (a view of qkv where it can be).
        """

    def paged_attention(
        self, q: Tensor, kv: KVLayer, batch: Batch, scale: float, window: int | None, soft_cap: float | None
    ) -> Tensor:
        """Causal attention of each request's new tokens over its pages, q [T, H, D] -> [T, H * D].

        Row i of request r (position p) sees positions max(0, p - window + 1) to p; window None: all. soft_cap c:
        scores = c * tanh(scores / c).
        """

    def decoder(
        self,
        decoder: Decoder,
        hidden: Tensor,
        kv: Sequence[KVLayer],
        lora: Sequence[LoraLayers] | None,
        batch: Batch,
    ) -> Tensor:
        """All layers and the last norm: hidden [T, C], changed in place, -> [T, C]. kv and lora: one per layer; `lora` is
        not looked at where no row has an adapter. `plan(batch)` has run. kernels/decoder.py says it in terms of the
        operations above; a backend may do it in one go."""
