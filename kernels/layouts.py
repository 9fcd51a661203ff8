"""The ABI of the kernels: shapes, dtypes, sentinels, and the checks every launcher calls.

Letters in shape comments: T tokens of a step, R requests of a step, P pages of the pool, H query heads, G key/value
heads, D head size, K input features, N output features, S slices that share one input, V vocabulary.

All index tensors are int32. -1 is the only sentinel: the base model (`token_adapter`), no write (`slot_mapping`), no
page (`page_table`, past a request's last page).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

PAGE_SIZE = 16
BASE = -1


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work, request-major: request r owns token rows `query_indptr[r]` to `query_indptr[r + 1]`.

    A decode is a request of one row. Padding rows (CUDA graphs) carry adapter -1 and slot -1 and belong to no request.
    """

    positions: Tensor  # [T] int32: each token's position in its request
    token_adapter: Tensor  # [T] int32: index into the adapter tables, -1 = base
    slot_mapping: Tensor  # [T] int32: page * PAGE_SIZE + offset where the token's K and V go, -1 = nowhere
    query_indptr: Tensor  # [R + 1] int32
    context_lens: Tensor  # [R] int32: tokens visible after this step's append, the new ones included
    page_table: Tensor  # [R, max pages] int32
    # Host-side facts for choosing a regime without a device synchronisation.
    num_tokens: int
    num_requests: int
    max_query_len: int
    max_context_len: int
    num_active_adapters: int  # distinct indices other than -1
    # What a backend derives once per step (segments, chunks) and all layers share. Filled by Ops.plan().
    plan: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's pages. Scales are there only for FP8 and INT8 storage: value = stored * scale[page, head, slot]."""

    k_pages: Tensor  # [P, G, PAGE_SIZE, D] bf16, fp16, fp32, float8_e4m3fn or int8
    v_pages: Tensor  # same
    k_scales: Tensor | None = None  # [P, G, PAGE_SIZE] fp32
    v_scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LoraTables:
    """Which rank rows each adapter owns, for one group of slices sharing an input (qkv, o, gate_up, down); the same for
    every layer."""

    row_table: Tensor  # [adapters, max rank] int32: rows of the bank, in rank order; -1 past the adapter's rows
    ranks: Tensor  # [adapters, S] int32: true rank of each slice, 0 = slice not adapted
    max_rank: int  # host copy: the largest rank in use, for choosing tiles


@dataclass(frozen=True, slots=True)
class LoraLayer:
    """One group of one layer: y[t, slice s] += (x[t] @ A_s.T) @ B_s, rows given by the tables.

    Row j of an adapter's slice s is a[row_table[adapter, j], s] (length K) and
    b[row_table[adapter, j], offset of s : offset of s+1] (B transposed, scaling folded in).
    """

    a: Tensor  # [rows, S, K]
    b: Tensor  # [rows, N], N = sum of the slices' output features
    slice_offsets: tuple[int, ...]  # length S + 1: 0, N_0, N_0 + N_1, ..., N
    tables: LoraTables


@dataclass(frozen=True, slots=True)
class LoraLayers:
    """One layer's LoRA, by group; None where the bank does not hold the group."""

    qkv: LoraLayer | None = None
    o: LoraLayer | None = None
    gate_up: LoraLayer | None = None
    down: LoraLayer | None = None


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Norm weights, [C] or [D], and what `Ops.pack_linear` made of the matrices."""

    input_norm: Tensor
    qkv: Any
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Any
    post_norm: Tensor
    gate_up: Any
    down: Any


@dataclass(frozen=True, slots=True)
class Decoder:
    """All layers of a model of the Llama family, from the embedding to the last norm."""

    layers: Sequence[DecoderLayer]
    final_norm: Tensor  # [C]
    cos_sin: Tensor  # [max position, D] fp32: cosines, then sines
    num_heads: int
    scale: float
    window: int | None  # positions a token sees; None: all before it
    activation: str  # "silu", "gelu" or "gelu_tanh"
    eps: float


def check(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition`: launchers refuse what they would compute wrongly."""
    if not condition:
        raise ValueError(message)


def check_index(name: str, tensor: Tensor, shape: tuple[int, ...] | None = None) -> None:
    check(tensor.dtype == torch.int32, f"{name}: dtype {tensor.dtype}, want int32")
    check(tensor.is_contiguous(), f"{name}: must be contiguous")
    if shape is not None:
        check(tuple(tensor.shape) == shape, f"{name}: shape {tuple(tensor.shape)}, want {shape}")
