"""The layers of a model in terms of the other operations: what `Ops.decoder` means, and how backends without one of their
own do it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kernels.layouts import Batch, Decoder, KVLayer, LoraLayer, LoraLayers

if TYPE_CHECKING:
    from kernels.ops import Ops

_NO_LORA = LoraLayers()


def run(
    ops: Ops,
    decoder: Decoder,
    hidden: Tensor,
    kv: Sequence[KVLayer],
    lora: Sequence[LoraLayers] | None,
    batch: Batch,
) -> Tensor:
    """As `Ops.decoder`."""
    if batch.num_active_adapters == 0:
        lora = None
    normed = ops.rms_norm(hidden, decoder.layers[0].input_norm, decoder.eps)
    for index, layer in enumerate(decoder.layers):
        adapters = _NO_LORA if lora is None else lora[index]
        qkv = _project(ops, normed, layer.qkv, adapters.qkv, batch)
        q = ops.kv_append(
            qkv, decoder.num_heads, decoder.cos_sin, kv[index], batch, layer.q_norm, layer.k_norm, decoder.eps
        )
        attention = ops.paged_attention(q, kv[index], batch, decoder.scale, decoder.window, None)
        output = _project(ops, attention, layer.o, adapters.o, batch)
        normed = ops.add_rms_norm(output, hidden, layer.post_norm, decoder.eps)
        gate_up = _project(ops, normed, layer.gate_up, adapters.gate_up, batch)
        inner = ops.act_mul(gate_up, decoder.activation)
        output = _project(ops, inner, layer.down, adapters.down, batch)
        last = index + 1 == len(decoder.layers)
        next_norm = decoder.final_norm if last else decoder.layers[index + 1].input_norm
        normed = ops.add_rms_norm(output, hidden, next_norm, decoder.eps)
    return normed


def _project(ops: Ops, x: Tensor, packed: Any, lora: LoraLayer | None, batch: Batch) -> Tensor:
    y = ops.linear(x, packed)
    if lora is not None:
        ops.lora(y, x, lora, batch)
    return y
