"""The native kernels as Python functions: checks what they rely on, passes addresses, allocates what they return.

A function that cannot take its arguments (a dtype, a head size, a stride) says so before anything is touched: see
the functions named takes….
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels.cpu import build
from kernels.cpu.decoder import NativeDecoder, describe, describe_step, linears_of
from kernels.layouts import (
    BASE,
    PAGE_SIZE,
    Batch,
    Decoder,
    DecoderLayer,
    KVLayer,
    LoraLayer,
    LoraLayers,
    LoraTables,
    check,
    check_index,
)

_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_WEIGHT_TYPES = {**_TYPES, torch.int8: 2}
_MAX_HEAD_DIM = 512
_HEAD_DIM_MULTIPLE = 32  # two halves of whole vectors, whatever the machine's vectors


@dataclass(slots=True)
class Plan:
    """One step's token rows by adapter: segment i is order[indptr[i] : indptr[i + 1]], of adapter seg_adapter[i]."""

    order: Tensor  # int32, like the others
    seg_indptr: Tensor
    seg_adapter: Tensor
    checked: set[int] = field(default_factory=set)  # ids of the tables seen in this step


@dataclass(frozen=True, slots=True)
class PackedWeight:
    data: Tensor  # [panels, K, outputs of a panel] fp32, bf16 or int8
    out_features: int


def make_plan(batch: Batch) -> Plan:
    for name in ("positions", "token_adapter", "slot_mapping", "query_indptr", "context_lens", "page_table"):
        check_index(name, getattr(batch, name))
    rows: dict[int, list[int]] = {}
    if batch.num_active_adapters:
        for row, adapter in enumerate(batch.token_adapter.tolist()):
            if adapter != BASE:
                rows.setdefault(adapter, []).append(row)
    order: list[int] = []
    indptr = [0]
    for members in rows.values():
        order += members
        indptr.append(len(order))
    tensors = [torch.tensor(values, dtype=torch.int32) for values in (order, indptr, list(rows))]
    return Plan(tensors[0], tensors[1], tensors[2])


class Library:
    def __init__(self, library: ctypes.CDLL) -> None:
        def function(name: str, signature: str) -> Any:
            """`signature`: p pointer, i int64, t int (a type code), f float."""
            kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "t": ctypes.c_int, "f": ctypes.c_float}
            found = getattr(library, name)
            found.argtypes, found.restype = [kinds[letter] for letter in signature], None
            return found

        library.linear_panel.restype = ctypes.c_int64
        self._panel: int = library.linear_panel()
        self.vectorised = bool(library.vectorised())  # or loops that stand in for instructions this CPU lacks

        self._rms_norm = function("rms_norm", "tppppiif")
        self._silu_mul = function("silu_mul", "tppii")
        self._kv_append = function("kv_append", "tppppppppiiiif")
        self._paged_attention = function("paged_attention", "tppippppp" + "i" * 7 + "f")
        self._pack_linear = function("pack_linear", "tppii")
        self._linear = function("linear", "tttpppppiii")
        self._lora = function("lora", "tppppppp" + "ippp" + "iiiii")
        self._decoder = function("decoder", "ppppp")

    @staticmethod
    def takes(*tensors: Tensor) -> bool:
        """Whether kernels take these together: one dtype they know, no gaps."""
        dtype = tensors[0].dtype
        return dtype in _TYPES and all(tensor.dtype == dtype and tensor.is_contiguous() for tensor in tensors)

    @staticmethod
    def takes_heads(kv: KVLayer) -> bool:
        head_dim = kv.k_pages.shape[3]
        return (
            Library.takes(kv.k_pages, kv.v_pages) and head_dim % _HEAD_DIM_MULTIPLE == 0 and head_dim <= _MAX_HEAD_DIM
        )

    def rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        _check_norm("weight", weight, x.shape[1])
        if residual is not None:
            check(residual.shape == x.shape, f"residual: shape {tuple(residual.shape)}, want {tuple(x.shape)}")
        out = torch.empty_like(x)
        self._rms_norm(
            _TYPES[x.dtype], out.data_ptr(), x.data_ptr(), _address(residual), weight.data_ptr(),
            x.shape[0], x.shape[1], eps,
        )  # fmt: skip
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        check(width % 2 == 0, f"gate_up: {width} wide, want gate and up of equal width")
        out = gate_up.new_empty(rows, width // 2)
        self._silu_mul(_TYPES[gate_up.dtype], out.data_ptr(), gate_up.data_ptr(), rows, width // 2)
        return out

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
        rows = qkv.shape[0]
        _, num_kv_heads, _, head_dim = kv.k_pages.shape
        width = (num_heads + 2 * num_kv_heads) * head_dim
        check(qkv.shape[1] == width, f"qkv: {qkv.shape[1]} wide, want {width}")
        _check_pages(kv)
        _check_rotary(cos_sin, head_dim)
        _check_norm("q_norm", q_norm, head_dim)
        _check_norm("k_norm", k_norm, head_dim)
        check_index("positions", batch.positions, (rows,))
        check_index("slot_mapping", batch.slot_mapping, (rows,))
        self._kv_append(
            _TYPES[qkv.dtype], qkv.data_ptr(), kv.k_pages.data_ptr(), kv.v_pages.data_ptr(),
            _address(q_norm), _address(k_norm), cos_sin.data_ptr(), batch.positions.data_ptr(),
            batch.slot_mapping.data_ptr(), rows, num_heads, num_kv_heads, head_dim, eps,
        )  # fmt: skip
        return qkv.view(rows, -1, head_dim)[:, :num_heads]

    def paged_attention(self, q: Tensor, kv: KVLayer, batch: Batch, scale: float, window: int | None) -> Tensor:
        rows, num_heads, head_dim = q.shape
        _, num_kv_heads, _, page_dim = kv.k_pages.shape
        check(head_dim == page_dim, f"q: shape {tuple(q.shape)}, want [T, H, {page_dim}]")
        check(num_heads % num_kv_heads == 0, f"q: {num_heads} heads over {num_kv_heads} K/V heads")
        check(q.stride()[1:] == (head_dim, 1), f"q: stride {q.stride()}, want heads without gaps")
        _check_pages(kv)
        _check_requests(batch)
        out = q.new_empty(rows, num_heads * head_dim)
        self._paged_attention(
            _TYPES[q.dtype], out.data_ptr(), q.data_ptr(), q.stride(0), kv.k_pages.data_ptr(), kv.v_pages.data_ptr(),
            batch.query_indptr.data_ptr(), batch.context_lens.data_ptr(), batch.page_table.data_ptr(),
            batch.page_table.shape[1], rows, batch.num_requests, num_heads, num_kv_heads, head_dim,
            window or 0, scale,
        )  # fmt: skip
        return out

    def pack_linear(self, weight: Tensor) -> PackedWeight:
        """`weight` [N, K] fp32, bf16 or int8, contiguous."""
        check(weight.is_contiguous(), "weight: must be contiguous")
        out_features, in_features = weight.shape
        panels = -(-out_features // self._panel)
        data = weight.new_empty(panels, in_features, self._panel)
        self._pack_linear(_WEIGHT_TYPES[weight.dtype], data.data_ptr(), weight.data_ptr(), out_features, in_features)
        return PackedWeight(data, out_features)

    def linear(
        self,
        x: Tensor,
        weight: PackedWeight,
        scales: Tensor | None,
        bias: Tensor | None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """`out_dtype`: x's, or fp32."""
        rows, in_features = x.shape
        data, out_features = weight.data, weight.out_features
        check(data.shape[1] == in_features, f"x: {in_features} features, the weight takes {data.shape[1]}")
        _check_vectors(out_features, x.dtype, scales, bias)
        check(out_dtype in (None, x.dtype, torch.float32), f"out_dtype: {out_dtype}, want that of x or fp32")
        y = x.new_empty(rows, out_features, dtype=out_dtype or x.dtype)
        self._linear(
            _TYPES[x.dtype], _TYPES[y.dtype], _WEIGHT_TYPES[data.dtype], y.data_ptr(), x.data_ptr(), data.data_ptr(),
            _address(scales), _address(bias), rows, out_features, in_features,
        )  # fmt: skip
        return y

    def lora(self, y: Tensor, x: Tensor, layer: LoraLayer, plan: Plan) -> None:
        self._check_once(layer, plan)
        tables = layer.tables
        rows, in_features = x.shape
        _check_group(layer, in_features, y.shape[1])
        check(len(y) == rows, f"y: {len(y)} rows, x has {rows}")
        offsets = (ctypes.c_int64 * len(layer.slice_offsets))(*layer.slice_offsets)
        self._lora(
            _TYPES[x.dtype], y.data_ptr(), x.data_ptr(), layer.a.data_ptr(), layer.b.data_ptr(),
            plan.order.data_ptr(), plan.seg_indptr.data_ptr(), plan.seg_adapter.data_ptr(), len(plan.seg_adapter),
            tables.row_table.data_ptr(), tables.ranks.data_ptr(), ctypes.addressof(offsets), len(offsets) - 1,
            tables.row_table.shape[1], rows, in_features, y.shape[1],
        )  # fmt: skip

    def decoder(self, native: NativeDecoder, hidden: Tensor, batch: Batch, plan: Plan) -> Tensor:
        for group in native.tables():
            self._check_once(group, plan)
        _check_requests(batch)
        check(len(hidden) == len(batch.positions), f"hidden: {len(hidden)} rows, the batch has {len(batch.positions)}")
        check(hidden.shape[1:] == native.decoder.final_norm.shape, f"hidden: {hidden.shape[1]} wide, not as the model")
        check(self.takes(hidden, native.decoder.final_norm), "hidden: want the model's dtype, no gaps")
        out = torch.empty_like(hidden)
        scratch = hidden.new_empty(len(hidden) * native.scratch_width)
        step = describe_step(batch, plan)
        self._decoder(
            ctypes.addressof(native.struct), ctypes.addressof(step),
            hidden.data_ptr(), out.data_ptr(), scratch.data_ptr(),
        )  # fmt: skip
        return out

    @staticmethod
    def _check_once(layer: LoraLayer, plan: Plan) -> None:
        if id(layer.tables) not in plan.checked:
            _check_tables(layer.tables, layer)
            plan.checked.add(id(layer.tables))

    def describe(
        self, decoder: Decoder, kv: Sequence[KVLayer], lora: Sequence[LoraLayers] | None, few_rows: int
    ) -> NativeDecoder | None:
        """What `decoder` takes; None where it does not take these: another activation or dtype, a weight that is not
        packed for it, layers that differ in shape. `few_rows`: as in decoder.py."""
        tensors = [decoder.final_norm]
        shapes: set[Any] = set()
        for index, layer in enumerate(decoder.layers):
            linears = linears_of(layer)
            weights = [packed.native for packed in linears if packed.native is not None]
            if len(weights) < len(linears):
                return None
            shapes.add((kv[index].k_pages.shape, *((w.out_features, w.data.shape[1]) for w in weights)))
            tensors += [packed.bias for packed in linears if packed.bias is not None]
            tensors += [kv[index].k_pages, kv[index].v_pages, layer.input_norm, layer.post_norm]
            tensors += [norm for norm in (layer.q_norm, layer.k_norm) if norm is not None]
            groups = lora[index] if lora is not None else LoraLayers()
            for group in (groups.qkv, groups.o, groups.gate_up, groups.down):
                tensors += [group.a, group.b] if group is not None else []
        if decoder.activation != "silu" or not self.takes_heads(kv[0]) or not self.takes(*tensors) or len(shapes) > 1:
            return None
        for index, layer in enumerate(decoder.layers):
            _check_layer(decoder, layer, kv[index], lora[index] if lora is not None else LoraLayers())
        return describe(decoder, kv, lora, _TYPES, _WEIGHT_TYPES, few_rows)


def _check_layer(decoder: Decoder, layer: DecoderLayer, kv: KVLayer, lora: LoraLayers) -> None:
    """That its parts fit together: what is checked of each operation where it is called alone."""
    hidden, inner = len(decoder.final_norm), layer.down.native.data.shape[1]
    _, num_kv_heads, _, head_dim = kv.k_pages.shape
    heads = decoder.num_heads * head_dim
    _check_pages(kv)
    _check_rotary(decoder.cos_sin, head_dim)
    check(decoder.num_heads % num_kv_heads == 0, f"num_heads: {decoder.num_heads} over {num_kv_heads} K/V heads")
    for name, inputs, outputs in (
        ("qkv", hidden, heads + 2 * num_kv_heads * head_dim),
        ("o", heads, hidden),
        ("gate_up", hidden, 2 * inner),
        ("down", inner, hidden),
    ):
        packed, group = getattr(layer, name), getattr(lora, name)
        shape = packed.native.out_features, packed.native.data.shape[1]
        check(shape == (outputs, inputs), f"{name}: shape {shape}, want {(outputs, inputs)}")
        _check_vectors(outputs, decoder.final_norm.dtype, packed.scales, packed.bias)
        if group is not None:
            _check_group(group, inputs, outputs)
    for name, size in (("input_norm", hidden), ("post_norm", hidden), ("q_norm", head_dim), ("k_norm", head_dim)):
        _check_norm(name, getattr(layer, name), size)


def _check_norm(name: str, weight: Tensor | None, size: int) -> None:
    check(weight is None or tuple(weight.shape) == (size,), f"{name}: want {size} values")


def _check_rotary(cos_sin: Tensor, head_dim: int) -> None:
    check(cos_sin.dtype == torch.float32 and cos_sin.is_contiguous(), "cos_sin: want fp32, no gaps")
    check(cos_sin.dim() == 2 and cos_sin.shape[1] == head_dim, f"cos_sin: want [max position, {head_dim}]")


def _check_pages(kv: KVLayer) -> None:
    check(kv.k_pages.shape == kv.v_pages.shape, "v_pages: K and V must have one shape")
    check(kv.k_pages.shape[2] == PAGE_SIZE, f"k_pages: {kv.k_pages.shape[2]} slots a page, want {PAGE_SIZE}")


def _check_requests(batch: Batch) -> None:
    check_index("query_indptr", batch.query_indptr, (batch.num_requests + 1,))
    check_index("context_lens", batch.context_lens, (batch.num_requests,))
    check(len(batch.page_table) == batch.num_requests, f"page_table: want {batch.num_requests} rows")


def _check_vectors(out_features: int, dtype: torch.dtype, scales: Tensor | None, bias: Tensor | None) -> None:
    for name, tensor, want in (("scales", scales, torch.float32), ("bias", bias, dtype)):
        if tensor is not None:
            check(tensor.dtype == want and tensor.is_contiguous(), f"{name}: want {want}, no gaps")
            check(tuple(tensor.shape) == (out_features,), f"{name}: want {out_features} values")


def _check_group(layer: LoraLayer, in_features: int, out_features: int) -> None:
    offsets, (rows, *inputs) = layer.slice_offsets, layer.a.shape
    want = [len(offsets) - 1, in_features]
    check(inputs == want, f"a: shape {tuple(layer.a.shape)}, want {(rows, *want)}")
    check(offsets[0] == 0 and list(offsets) == sorted(offsets), f"slice_offsets: {offsets} must rise from 0")
    check(offsets[-1] == out_features, f"slice_offsets: {offsets} must end at {out_features}, as wide as y")
    check(tuple(layer.b.shape) == (rows, out_features), f"b: shape {tuple(layer.b.shape)}, want {(rows, out_features)}")


def _check_tables(tables: LoraTables, layer: LoraLayer) -> None:
    check_index("row_table", tables.row_table)
    check_index("ranks", tables.ranks, (tables.row_table.shape[0], len(layer.slice_offsets) - 1))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def load() -> Library | None:
    """None where the library cannot be built; see build.py."""
    library = build.load()
    return None if library is None else Library(library)
