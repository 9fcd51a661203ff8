"""Attention over pages. A request of one new token is a decode and any other a prefill, whatever its neighbours are: a
mixed batch runs both kernels, each of which leaves the other's requests alone."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.kv_storage import kernel_arguments
from kernels.layouts import Batch, KVLayer, check, check_index
from kernels.paged_decode import decode
from kernels.paged_prefill import MAX_GROUP, prefill

_MAX_HEAD_DIM = 256


def paged_attention(
    q: Tensor, kv: KVLayer, batch: Batch, scale: float, window: int | None, soft_cap: float | None
) -> Tensor:
    """Causal attention of each request's new tokens over its pages, q [T, H, D] -> [T, H * D].

    As Ops.paged_attention. q bf16, fp16 or fp32, each row's heads contiguous (a view of qkv is); K and V of the same
    dtype, or INT8 or FP8. Rows of no request stay unwritten. `batch.max_context_len` may exceed the longest
    context, as in a captured graph.
    """
    pages = kernel_arguments(kv)
    num_kv_heads, head_dim = kv.k_pages.shape[1], kv.k_pages.shape[3]
    check(q.dim() == 3 and q.shape[2] == head_dim, f"q: shape {tuple(q.shape)}, want [T, H, {head_dim}]")
    check(q.stride(2) == 1 and q.stride(1) == head_dim, "q: a row's heads must be contiguous")
    check(q.shape[1] % num_kv_heads == 0, f"q: {q.shape[1]} heads over {num_kv_heads} K/V heads")
    group = q.shape[1] // num_kv_heads
    check(group <= MAX_GROUP, f"q: {group} heads per K/V head, at most {MAX_GROUP}")
    check(head_dim <= _MAX_HEAD_DIM, f"k_pages: head size {head_dim}, at most {_MAX_HEAD_DIM}")
    check(kv.k_scales is not None or kv.k_pages.dtype == q.dtype, f"k_pages: {kv.k_pages.dtype}, but q: {q.dtype}")
    check(window is None or window > 0, f"window: {window}, want at least 1")
    check(soft_cap is None or soft_cap > 0, f"soft_cap: {soft_cap}, want more than 0")
    check_index("query_indptr", batch.query_indptr, (batch.num_requests + 1,))
    check_index("context_lens", batch.context_lens, (batch.num_requests,))
    check_index("page_table", batch.page_table)
    check(batch.max_query_len <= q.shape[0], f"max_query_len: {batch.max_query_len} of {q.shape[0]} rows")
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if batch.num_requests and batch.max_context_len:
        if batch.max_query_len > 1:
            prefill(q, pages, batch, out, scale, window, soft_cap)
        if batch.max_query_len == 1 or batch.num_requests > 1:
            decode(q, pages, batch, out, scale, window, soft_cap)
    return out.flatten(1)
