"""Attention over pages in plain torch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.layouts import PAGE_SIZE, Batch, KVLayer
from kernels.reference.kv_append import dequantise


def paged_attention(
    q: Tensor, kv: KVLayer, batch: Batch, scale: float, window: int | None, soft_cap: float | None
) -> Tensor:
    """As Ops.paged_attention, request by request in fp32; rows of no request are zero."""
    num_kv_heads, head_dim = kv.k_pages.shape[1], kv.k_pages.shape[3]
    group = q.shape[1] // num_kv_heads
    out = torch.zeros((q.shape[0], q.shape[1] * head_dim), dtype=q.dtype, device=q.device)
    starts = batch.query_indptr.tolist()
    for request, context in enumerate(batch.context_lens.tolist()):
        first, last = starts[request], starts[request + 1]
        if first == last:
            continue
        pages = batch.page_table[request, : -(-context // PAGE_SIZE)].long()
        k = _gather(kv.k_pages, kv.k_scales, pages, context).repeat_interleave(group, dim=0)
        v = _gather(kv.v_pages, kv.v_scales, pages, context).repeat_interleave(group, dim=0)
        scores = scale * torch.einsum("thd,hnd->htn", q[first:last].float(), k)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        query_at = torch.arange(context - (last - first), context, device=q.device).unsqueeze(1)
        key_at = torch.arange(context, device=q.device)
        visible = key_at <= query_at
        if window is not None:
            visible &= key_at > query_at - window
        weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
        out[first:last] = torch.einsum("htn,hnd->thd", weights, v).flatten(1).to(q.dtype)
    return out


def _gather(pages: Tensor, scales: Tensor | None, indices: Tensor, context: int) -> Tensor:
    """The first `context` vectors of the pages `indices` -> [G, context, D] fp32."""
    # float8 cannot be indexed on every backend: bytes can.
    chosen = pages[indices] if scales is None else pages.view(torch.uint8)[indices].view(pages.dtype)
    values = dequantise(chosen, None if scales is None else scales[indices])
    return values.transpose(0, 1).flatten(1, 2)[:, :context]
