"""KV append and paged attention for CPUs, in torch: all decodes of a step at once, prefills request by request.

What every layer needs alike (indices, masks, angles) is worked out once per step in `StepPlan`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from kernels.layouts import PAGE_SIZE, Batch, KVLayer
from kernels.reference.norm import rms_norm


@dataclass(slots=True)
class StepPlan:
    """One step's shared indices; those that depend on the model's heads are made at the first layer."""

    decodes: list[int]  # requests of one row
    prefills: list[int]  # requests of several rows
    starts: list[int]  # query_indptr
    contexts: list[int]  # context_lens
    written: Tensor | None  # token rows with a slot, None = all
    decode_rows: Tensor | None  # token rows of `decodes`, None = all rows in order
    append_index: Tensor | None = None
    decode_pages: Tensor | None = None
    turn: tuple[Tensor, Tensor] | None = None  # cosines, sines [T, 1, D / 2]
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)
    unused: Tensor | None = None  # gathered vectors past their request's context


def make_plan(batch: Batch) -> StepPlan:
    starts = batch.query_indptr.tolist()
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    decodes = [request for request, length in enumerate(lengths) if length == 1]
    all_decodes = len(decodes) == batch.num_requests == len(batch.positions)
    slots = batch.slot_mapping
    return StepPlan(
        decodes=decodes,
        prefills=[request for request, length in enumerate(lengths) if length > 1],
        starts=starts,
        contexts=batch.context_lens.tolist(),
        written=None if bool((slots >= 0).all()) else (slots >= 0).nonzero().squeeze(1),
        decode_rows=None if all_decodes else torch.tensor([starts[request] for request in decodes]),
    )


def kv_append(
    qkv: Tensor,
    num_heads: int,
    cos_sin: Tensor,
    kv: KVLayer,
    batch: Batch,
    plan: StepPlan,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """As Ops.kv_append, for pages of qkv's dtype."""
    num_kv_heads, head_dim = kv.k_pages.shape[1], kv.k_pages.shape[3]
    heads = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, head_dim))
    qk = heads[:, : num_heads + num_kv_heads]
    if q_norm is not None and k_norm is not None:
        weight = torch.cat([q_norm.expand(num_heads, -1), k_norm.expand(num_kv_heads, -1)])
        qk = rms_norm(qk, weight, eps)
    if plan.turn is None:
        cos, sin = cos_sin.index_select(0, batch.positions.long()).unsqueeze(1).chunk(2, dim=-1)
        plan.turn = cos.contiguous(), sin.contiguous()
    cos, sin = plan.turn
    first, second = qk.float().chunk(2, dim=-1)
    rotated = torch.empty(qk.shape, dtype=torch.float32)
    half = head_dim // 2
    torch.mul(first, cos, out=rotated[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated[..., half:]).addcmul_(first, sin)
    rotated = rotated.to(qkv.dtype)
    if plan.append_index is None:
        slots = (batch.slot_mapping if plan.written is None else batch.slot_mapping[plan.written]).long()
        group_base = torch.arange(num_kv_heads) * PAGE_SIZE
        page_base = slots // PAGE_SIZE * (num_kv_heads * PAGE_SIZE) + slots % PAGE_SIZE
        plan.append_index = (page_base.unsqueeze(1) + group_base).flatten()
    for new, pages in ((rotated[:, num_heads:], kv.k_pages), (heads[:, num_heads + num_kv_heads :], kv.v_pages)):
        values = new if plan.written is None else new.index_select(0, plan.written)
        pages.view(-1, head_dim).index_copy_(0, plan.append_index, values.reshape(-1, head_dim))
    return rotated[:, :num_heads]


def paged_attention(q: Tensor, kv: KVLayer, batch: Batch, plan: StepPlan, scale: float, window: int | None) -> Tensor:
    """As Ops.paged_attention without a soft cap, for pages of q's dtype."""
    if plan.decode_rows is None:
        return _decode(q, kv, batch, plan, scale, window)
    out = q.new_zeros(q.shape[0], q.shape[1] * q.shape[2])
    if plan.decodes:
        out[plan.decode_rows] = _decode(q.index_select(0, plan.decode_rows), kv, batch, plan, scale, window)
    for request in plan.prefills:
        rows = slice(plan.starts[request], plan.starts[request + 1])
        out[rows] = _prefill(q[rows], kv, batch, plan, request, scale, window)
    return out


def _decode(q: Tensor, kv: KVLayer, batch: Batch, plan: StepPlan, scale: float, window: int | None) -> Tensor:
    """q [B, H, D] of the requests in `plan.decodes` -> [B, H * D]."""
    num_requests, _, head_dim = q.shape
    num_kv_heads = kv.k_pages.shape[1]
    if plan.decode_pages is None:
        contexts = torch.tensor([plan.contexts[request] for request in plan.decodes]).unsqueeze(1)
        num_pages = -(-int(contexts.max()) // PAGE_SIZE)
        table = batch.page_table if plan.decode_rows is None else batch.page_table[plan.decodes]
        pages = table[:, :num_pages].long().clamp(min=0) * num_kv_heads  # [B, pages]
        plan.decode_pages = (pages.unsqueeze(1) + torch.arange(num_kv_heads).unsqueeze(1)).flatten()
        past = torch.arange(num_pages * PAGE_SIZE) >= contexts  # [B, L]
        plan.unused = past.unsqueeze(1).expand(-1, num_kv_heads, -1).flatten().nonzero().squeeze(1)
    mask = plan.masks.get((-1, window))
    if mask is None:
        contexts = torch.tensor([plan.contexts[request] for request in plan.decodes]).unsqueeze(1)
        at = torch.arange(-(-int(contexts.max()) // PAGE_SIZE) * PAGE_SIZE)
        visible = at < contexts
        if window is not None:
            visible &= at >= contexts - window
        mask = torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, float("-inf"))[:, None, None]
        plan.masks[-1, window] = mask
    k, v = (
        pages.view(-1, PAGE_SIZE * head_dim)
        .index_select(0, plan.decode_pages)
        .view(num_requests, num_kv_heads, -1, head_dim)
        for pages in (kv.k_pages, kv.v_pages)
    )
    if plan.unused is not None and len(plan.unused):
        # A weight of zero does not silence a NaN: what was never written must not be read.
        for gathered in (k, v):
            gathered.view(-1, head_dim).index_fill_(0, plan.unused, 0.0)
    # The query heads of one KV head stand as rows of one attention: no head is repeated.
    grouped = q.reshape(num_requests, num_kv_heads, -1, head_dim)
    return functional.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale).flatten(1)


def _prefill(
    q: Tensor, kv: KVLayer, batch: Batch, plan: StepPlan, request: int, scale: float, window: int | None
) -> Tensor:
    """q [n, H, D] of one request -> [n, H * D]."""
    length, context = q.shape[0], plan.contexts[request]
    pages = batch.page_table[request, : -(-context // PAGE_SIZE)]
    k, v = (
        store.index_select(0, pages).transpose(0, 1).flatten(1, 2)[:, :context].unsqueeze(0)
        for store in (kv.k_pages, kv.v_pages)
    )
    causal = length == context and (window is None or window >= context)
    mask = None
    if not causal:
        mask = plan.masks.get((request, window))
        if mask is None:
            query_at, key_at = torch.arange(context - length, context).unsqueeze(1), torch.arange(context)
            mask = key_at <= query_at
            if window is not None:
                mask &= key_at > query_at - window
            plan.masks[request, window] = mask
    out = functional.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0), k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
    )
    return out.squeeze(0).transpose(0, 1).flatten(1)
