"""`Ops` for CPUs: native kernels where they are built and take the arguments, plain torch for the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu import library
from kernels.cpu.decoder import NativeDecoder
from kernels.cpu.library import PackedWeight
from kernels.cpu.torch_ops import TorchCpuOps, prepacks
from kernels.layouts import Batch, Decoder, KVLayer, LoraLayer, LoraLayers

# Where oneDNN has instructions that the native product does not use (bf16 arithmetic, other architectures): up to this many
# rows the native one is faster all the same.
_FEW_ROWS = 8
# oneDNN packs a copy; both are kept for this many bytes of weights, of the rest oneDNN's alone.
_BOTH_LAYOUTS_BYTES = 4 * 2**30

WeightDtype = Literal["int8"]


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight in the forms `linear` chooses from: one of the first three is there, or the first two."""

    native: PackedWeight | None
    prepacked: Any  # what TorchCpuOps.pack_linear made
    plain: Tensor | None  # [N, K] int8, where native kernels cannot take it
    scales: Tensor | None  # [N] fp32, of int8 weights
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _Described:
    """What was asked for, held so that it stays itself, and the answer."""

    decoder: Decoder
    kv: Sequence[KVLayer]
    lora: Sequence[LoraLayers] | None
    native: NativeDecoder | None


class CpuOps(TorchCpuOps):
    """See `kernels.ops.Ops`. `weight_dtype` "int8" keeps the weights of linears in INT8, symmetric, a scale per output."""

    def __init__(self, weight_dtype: WeightDtype | None = None) -> None:
        """Loads the native kernels, building them if need be; see build.py."""
        self._native = library.load()
        self._weight_dtype = weight_dtype
        self._twice_bytes = 0  # of weights kept in both layouts
        # With and without adapters, and as few others as a bank has largest ranks.
        self._described: deque[_Described] = deque(maxlen=8)

    def plan(self, batch: Batch) -> None:
        super().plan(batch)
        if self._native is not None:
            batch.plan["native"] = library.make_plan(batch)

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Packed:
        stored, scales = weight.contiguous(), None
        native = self._native if self._native is not None and self._native.takes(stored) else None
        if self._weight_dtype == "int8":
            stored, scales = quantise(stored)
        elif native is None or self._onednn_is_faster(stored.dtype):
            self._twice_bytes += stored.nbytes
            twice = native is not None and self._twice_bytes <= _BOTH_LAYOUTS_BYTES
            prepacked = super().pack_linear(stored, bias)
            return Packed(native.pack_linear(stored) if native and twice else None, prepacked, None, None, bias)
        if native is None:
            return Packed(None, None, stored, scales, bias)
        return Packed(native.pack_linear(stored), None, None, scales, bias)

    def _onednn_is_faster(self, dtype: torch.dtype) -> bool:
        assert self._native is not None
        return prepacks(dtype) and (dtype == torch.bfloat16 or not self._native.vectorised)

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        if self._takes_rows(packed, x.shape[0]):
            assert self._native is not None and packed.native is not None
            return self._native.linear(x.contiguous(), packed.native, packed.scales, packed.bias)
        if packed.prepacked is not None:
            return super().linear(x, packed.prepacked)
        assert packed.plain is not None and packed.scales is not None
        # Scaled first: products with the integers themselves would leave the range of fp16.
        weight = (packed.plain * packed.scales.unsqueeze(1)).to(x.dtype)
        return functional.linear(x, weight, packed.bias)

    def logits(self, x: Tensor, packed: Packed) -> Tensor:
        # A head that has both layouts is rounded as oneDNN rounds it, for few rows too: ties would else come and go with the
        # number of rows.
        if self._native is None or packed.native is None or packed.prepacked is not None:
            return super().logits(x, packed)
        return self._native.linear(x.contiguous(), packed.native, packed.scales, packed.bias, torch.float32)

    @staticmethod
    def _takes_rows(packed: Packed, rows: int) -> bool:
        """Whether the native product is the one for so many."""
        return packed.native is not None and (packed.prepacked is None or rows <= _FEW_ROWS)

    def decoder(
        self,
        decoder: Decoder,
        hidden: Tensor,
        kv: Sequence[KVLayer],
        lora: Sequence[LoraLayers] | None,
        batch: Batch,
    ) -> Tensor:
        if batch.num_active_adapters == 0:
            lora = None
        native = self._described_as(decoder, kv, lora)
        if native is None or (native.max_rows is not None and len(hidden) > native.max_rows):
            return super().decoder(decoder, hidden, kv, lora, batch)
        assert self._native is not None
        return self._native.decoder(native, hidden, batch, cast(library.Plan, batch.plan["native"]))

    def _described_as(
        self, decoder: Decoder, kv: Sequence[KVLayer], lora: Sequence[LoraLayers] | None
    ) -> NativeDecoder | None:
        """As the native kernels want it; made once. None where they do not take it."""
        if self._native is None:
            return None
        for known in self._described:
            if known.decoder is decoder and known.kv is kv and known.lora is lora:
                return known.native
        native = self._native.describe(decoder, kv, lora, _FEW_ROWS)
        self._described.append(_Described(decoder, kv, lora, native))
        return native

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if self._native is None or not self._native.takes(x, weight):
            return super().rms_norm(x, weight, eps)
        return self._native.rms_norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if self._native is None or not self._native.takes(x, residual, weight):
            return super().add_rms_norm(x, residual, weight, eps)
        return self._native.rms_norm(x, residual, weight, eps)

    def act_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        if self._native is None or activation != "silu" or not self._native.takes(gate_up):
            return super().act_mul(gate_up, activation)
        return self._native.silu_mul(gate_up)

    def lora(self, y: Tensor, x: Tensor, layer: LoraLayer, batch: Batch) -> None:
        if self._native is None or not self._native.takes(y, x, layer.a, layer.b):
            return super().lora(y, x, layer, batch)
        return self._native.lora(y, x, layer, cast(library.Plan, batch.plan["native"]))

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
        norms = [weight for weight in (q_norm, k_norm) if weight is not None]
        if self._native is None or not self._native.takes_heads(kv) or not self._native.takes(qkv, kv.k_pages, *norms):
            return super().kv_append(qkv, num_heads, cos_sin, kv, batch, q_norm, k_norm, eps)
        return self._native.kv_append(qkv, num_heads, cos_sin, kv, batch, q_norm, k_norm, eps)

    def paged_attention(
        self, q: Tensor, kv: KVLayer, batch: Batch, scale: float, window: int | None, soft_cap: float | None
    ) -> Tensor:
        if (
            self._native is None
            or soft_cap is not None
            or kv.k_pages.dtype != q.dtype
            or not self._native.takes_heads(kv)
        ):
            return super().paged_attention(q, kv, batch, scale, window, soft_cap)
        return self._native.paged_attention(q, kv, batch, scale, window)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> int8 [N, K] and fp32 scales [N]: weight ≈ int8 * scale, off by at most scale / 2."""
    wide = weight.float()
    scales = (wide.abs().amax(dim=1) / 127.0).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scales.unsqueeze(1)).round().to(torch.int8), scales
