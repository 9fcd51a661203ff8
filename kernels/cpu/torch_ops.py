"""`Ops` for CPUs in plain torch: prepacked linears, attention over all decodes at once, LoRA per adapter; the rest as defined.

What `CpuOps` is made of where there is no compiler, and for what its native kernels leave out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu import attention, lora
from kernels.layouts import Batch, KVLayer, LoraLayer
from kernels.reference.ops import ReferenceOps

# oneDNN lays a weight out for a number of rows; this one costs decodes of 8 to 64 requests nothing and prefills little.
_PACK_ROWS = 32

T = TypeVar("T")


class TorchCpuOps(ReferenceOps):
    """See `kernels.ops.Ops`."""

    def plan(self, batch: Batch) -> None:
        batch.plan.clear()  # of another step, where a batch is used again

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Any:
        if not prepacks(weight.dtype):
            return super().pack_linear(weight, bias)
        return torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS), bias

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        weight, bias = packed
        if not weight.is_mkldnn:
            return super().linear(x, packed)
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(residual.add_(x), weight.shape, weight, eps)

    def lora(self, y: Tensor, x: Tensor, layer: LoraLayer, batch: Batch) -> None:
        lora.lora(y, x, layer, _planned(batch, "torch_lora", lora.make_plan))

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
        if kv.k_pages.dtype != qkv.dtype:
            return super().kv_append(qkv, num_heads, cos_sin, kv, batch, q_norm, k_norm, eps)
        plan = _planned(batch, "torch_attention", attention.make_plan)
        return attention.kv_append(qkv, num_heads, cos_sin, kv, batch, plan, q_norm, k_norm, eps)

    def paged_attention(
        self, q: Tensor, kv: KVLayer, batch: Batch, scale: float, window: int | None, soft_cap: float | None
    ) -> Tensor:
        if kv.k_pages.dtype != q.dtype or soft_cap is not None:
            return super().paged_attention(q, kv, batch, scale, window, soft_cap)
        plan = _planned(batch, "torch_attention", attention.make_plan)
        return attention.paged_attention(q, kv, batch, plan, scale, window)


def _planned(batch: Batch, name: str, make: Callable[[Batch], T]) -> T:
    """What all layers share, made when the first asks: native kernels may leave nothing to plan for."""
    if name not in batch.plan:
        batch.plan[name] = make(batch)
    return cast(T, batch.plan[name])


def prepacks(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes in `dtype` on this machine."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
