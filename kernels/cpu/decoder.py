"""`Ops.decoder` as one native call: the model, its pages and the bank described once, in the structures of
native/decoder.cpp; a step then passes its index tensors.

Besides the time of its calls this gives up the interpreter for a whole step, so other threads are not felt in it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kernels.layouts import Batch, Decoder, DecoderLayer, KVLayer, LoraLayer, LoraLayers

if TYPE_CHECKING:
    from kernels.cpu.library import Plan
    from kernels.cpu.ops import Packed


class _Linear(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "scales", "bias")),
        *((name, ctypes.c_int64) for name in ("n", "k", "type")),
    ]


class _LoraGroup(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "row_table", "ranks", "offsets")),
        *((name, ctypes.c_int64) for name in ("slices", "max_rank")),
    ]


class _Projection(ctypes.Structure):
    _fields_ = [("linear", _Linear), ("lora", _LoraGroup)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Projection) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "q_norm", "k_norm", "post_norm", "k_pages", "v_pages")),
    ]


class _Decoder(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        ("num_layers", ctypes.c_int64),
        ("final_norm", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("type", "heads", "kv_heads", "dim", "window")),
        *((name, ctypes.c_float) for name in ("scale", "eps")),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                "positions", "slots", "indptr", "contexts", "page_table", "order", "seg_indptr", "seg_adapter",
            )
        ),
        *((name, ctypes.c_int64) for name in ("rows", "requests", "max_pages", "segments")),
    ]  # fmt: skip


@dataclass(slots=True)
class NativeDecoder:
    """The structures, and all that they point to."""

    decoder: Decoder
    kv: Sequence[KVLayer]
    lora: Sequence[LoraLayers] | None
    struct: _Decoder
    scratch_width: int  # values per row
    max_rows: int | None  # above which oneDNN multiplies some of its weights faster; None: never
    kept: list[Any] = field(default_factory=list)

    def tables(self) -> list[LoraLayer]:
        """A layer of each group: all layers share their tables."""
        first = self.lora[0] if self.lora else LoraLayers()
        return [group for group in (first.qkv, first.o, first.gate_up, first.down) if group is not None]


def describe(
    decoder: Decoder,
    kv: Sequence[KVLayer],
    lora: Sequence[LoraLayers] | None,
    types: dict[Any, int],
    weight_types: dict[Any, int],
    few_rows: int,
) -> NativeDecoder:
    """Only for what the native kernels take: see `Library.describe`. `few_rows`: how many they multiply faster than oneDNN."""
    kept: list[Any] = []

    def projection(packed: Packed, group: LoraLayer | None) -> _Projection:
        assert packed.native is not None
        data = packed.native.data
        linear = _Linear(
            data.data_ptr(), _address(packed.scales), _address(packed.bias),
            packed.native.out_features, data.shape[1], weight_types[data.dtype],
        )  # fmt: skip
        if group is None:
            return _Projection(linear, _LoraGroup())
        offsets = (ctypes.c_int64 * len(group.slice_offsets))(*group.slice_offsets)
        kept.append(offsets)
        tables = group.tables
        return _Projection(
            linear,
            _LoraGroup(
                group.a.data_ptr(), group.b.data_ptr(), tables.row_table.data_ptr(), tables.ranks.data_ptr(),
                ctypes.addressof(offsets), len(offsets) - 1, tables.row_table.shape[1],
            ),
        )  # fmt: skip

    layers = (_Layer * len(decoder.layers))()
    for index, layer in enumerate(decoder.layers):
        groups = lora[index] if lora is not None else LoraLayers()
        layers[index] = _Layer(
            projection(layer.qkv, groups.qkv), projection(layer.o, groups.o),
            projection(layer.gate_up, groups.gate_up), projection(layer.down, groups.down),
            layer.input_norm.data_ptr(), _address(layer.q_norm), _address(layer.k_norm), layer.post_norm.data_ptr(),
            kv[index].k_pages.data_ptr(), kv[index].v_pages.data_ptr(),
        )  # fmt: skip
    kept.append(layers)
    _, num_kv_heads, _, head_dim = kv[0].k_pages.shape
    struct = _Decoder(
        layers, len(layers), decoder.final_norm.data_ptr(), decoder.cos_sin.data_ptr(),
        types[decoder.final_norm.dtype], decoder.num_heads, num_kv_heads, head_dim, decoder.window or 0,
        decoder.scale, decoder.eps,
    )  # fmt: skip
    first = layers[0]
    width = first.qkv.linear.n + first.o.linear.k + first.o.linear.n + first.gate_up.linear.n + first.down.linear.k
    either = any(packed.prepacked is not None for layer in decoder.layers for packed in linears_of(layer))
    return NativeDecoder(decoder, kv, lora, struct, width, few_rows if either else None, kept)


def linears_of(layer: DecoderLayer) -> tuple[Packed, ...]:
    return layer.qkv, layer.o, layer.gate_up, layer.down


def describe_step(batch: Batch, plan: Plan) -> _Step:
    """Valid while `batch` and `plan` are."""
    return _Step(
        batch.positions.data_ptr(), batch.slot_mapping.data_ptr(), batch.query_indptr.data_ptr(),
        batch.context_lens.data_ptr(), batch.page_table.data_ptr(),
        plan.order.data_ptr(), plan.seg_indptr.data_ptr(), plan.seg_adapter.data_ptr(),
        len(batch.positions), batch.num_requests, batch.page_table.shape[1], len(plan.seg_adapter),
    )  # fmt: skip


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
