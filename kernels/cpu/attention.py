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

# Decodes attended to together: their gathered pages should still be in the cache when attention reads them (groups of 8
# took a quarter less CPU time than all 32 at once, at 128 tokens of context), and padding to the longest stays small.
_GROUP = 8


@dataclass(slots=True)
class DecodeGroup:
    """Decodes of similar context."""

    requests: list[int]
    rows: Tensor  # [B] token rows
    contexts: Tensor  # [B, 1]
    num_pages: int
    pages: Tensor | None = None  # rows of [P * G, PAGE_SIZE * D], by request, KV head, page
    unused: Tensor | None = None  # gathered vectors past their request's context
    masks: dict[int | None, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class StepPlan:
    """One step's shared indices; those that depend on the model's heads are made at the first layer."""

    decodes: list[DecodeGroup]  # requests of one row
    prefills: list[int]  # requests of several rows
    starts: list[int]  # query_indptr
    contexts: list[int]  # context_lens
    written: Tensor | None  # token rows with a slot, None = all
    append_index: Tensor | None = None
    turn: tuple[Tensor, Tensor] | None = None  # cosines, sines [T, 1, D / 2]
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)  # of prefills


def make_plan(batch: Batch) -> StepPlan:
    starts, contexts = batch.query_indptr.tolist(), batch.context_lens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    by_context = sorted((r for r, length in enumerate(lengths) if length == 1), key=contexts.__getitem__)
    slots = batch.slot_mapping
    return StepPlan(
        decodes=[_group(by_context[i : i + _GROUP], starts, contexts) for i in range(0, len(by_context), _GROUP)],
        prefills=[request for request, length in enumerate(lengths) if length > 1],
        starts=starts,
        contexts=contexts,
        written=None if bool((slots >= 0).all()) else (slots >= 0).nonzero().squeeze(1),
    )


def _group(requests: list[int], starts: list[int], contexts: list[int]) -> DecodeGroup:
    longest = max(contexts[request] for request in requests)
    return DecodeGroup(
        requests,
        rows=torch.tensor([starts[request] for request in requests]),
        contexts=torch.tensor([contexts[request] for request in requests]).unsqueeze(1),
        num_pages=-(-longest // PAGE_SIZE),
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
    out = q.new_zeros(q.shape[0], q.shape[1] * q.shape[2])
    for group in plan.decodes:
        out.index_copy_(0, group.rows, _decode(q.index_select(0, group.rows), kv, batch, group, scale, window))
    for request in plan.prefills:
        rows = slice(plan.starts[request], plan.starts[request + 1])
        out[rows] = _prefill(q[rows], kv, batch, plan, request, scale, window)
    return out


def _decode(q: Tensor, kv: KVLayer, batch: Batch, group: DecodeGroup, scale: float, window: int | None) -> Tensor:
    """q [B, H, D] of the requests of `group` -> [B, H * D]."""
    num_requests, _, head_dim = q.shape
    num_kv_heads = kv.k_pages.shape[1]
    if group.pages is None:
        at = torch.arange(group.num_pages * PAGE_SIZE)
        table = batch.page_table[group.requests, : group.num_pages].long().clamp(min=0) * num_kv_heads
        group.pages = (table.unsqueeze(1) + torch.arange(num_kv_heads).unsqueeze(1)).flatten()
        past = (at >= group.contexts).unsqueeze(1).expand(-1, num_kv_heads, -1)  # [B, G, L]
        group.unused = past.flatten().nonzero().squeeze(1)
    if window not in group.masks:
        at = torch.arange(group.num_pages * PAGE_SIZE)
        hidden = at >= group.contexts
        if window is not None:
            hidden |= at < group.contexts - window
        mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, float("-inf"))
        group.masks[window] = mask[:, None, None]  # [B, 1, 1, L]
    k, v = (
        store.view(-1, PAGE_SIZE * head_dim).index_select(0, group.pages).view(num_requests, num_kv_heads, -1, head_dim)
        for store in (kv.k_pages, kv.v_pages)
    )
    if group.unused is not None and len(group.unused):
        # A weight of zero does not silence a NaN: what was never written must not be read.
        for gathered in (k, v):
            gathered.view(-1, head_dim).index_fill_(0, group.unused, 0.0)
    # The query heads of one KV head stand as rows of one attention: no head is repeated.
    grouped = q.view(num_requests, num_kv_heads, -1, head_dim)
    out = functional.scaled_dot_product_attention(grouped, k, v, attn_mask=group.masks[window], scale=scale)
    return out.flatten(1)


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
