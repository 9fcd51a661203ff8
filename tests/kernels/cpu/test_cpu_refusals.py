"""Native kernels read memory by address: what does not fit together is refused by name before anything is touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu import library
from kernels.cpu.library import Library
from kernels.cpu.ops import CpuOps
from kernels.layouts import BASE, PAGE_SIZE, Batch, Decoder, DecoderLayer, KVLayer, LoraLayer, LoraLayers
from kernels.workloads import make_batch, make_lora_layer

ROWS, HEADS, KV_HEADS, DIM, HIDDEN, INNER = 3, 4, 2, 32, 64, 40
QKV = (HEADS + 2 * KV_HEADS) * DIM


@pytest.fixture(scope="module")
def native() -> Library:
    loaded = library.load()
    assert loaded is not None, "the native kernels do not build here"
    return loaded


@pytest.fixture
def batch(generator: torch.Generator) -> Batch:
    return make_batch([1] * ROWS, [1] * ROWS, [BASE] * ROWS, generator)


def pages(slots: int = PAGE_SIZE) -> KVLayer:
    return KVLayer(*(torch.zeros(ROWS, KV_HEADS, slots, DIM) for _ in range(2)))


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


@pytest.mark.parametrize(
    ("says", "call"),
    [
        ("weight", lambda n: n.rms_norm(ones(2, 8), None, ones(7), 1e-5)),
        ("residual", lambda n: n.rms_norm(ones(2, 8), ones(1, 8), ones(8), 1e-5)),
        ("gate_up", lambda n: n.silu_mul(ones(2, 7))),
        ("x", lambda n: n.linear(ones(1, 9), n.pack_linear(ones(4, 8)), None, None)),
        ("bias", lambda n: n.linear(ones(1, 8), n.pack_linear(ones(4, 8)), None, ones(3))),
        ("bias", lambda n: n.linear(ones(1, 8), n.pack_linear(ones(4, 8)), None, ones(4).bfloat16())),
        ("scales", lambda n: n.linear(ones(1, 8), n.pack_linear(ones(4, 8).to(torch.int8)), ones(5), None)),
    ],
)
def test_of_one_row_at_a_time(native: Library, says: str, call: Callable[[Library], object]) -> None:
    with pytest.raises(ValueError, match=rf"^{says}:"):
        call(native)


@pytest.mark.parametrize(
    ("says", "change"),
    [
        ("qkv", {"qkv": ones(ROWS, QKV + DIM)}),
        ("cos_sin", {"cos_sin": ones(8, DIM + 2)}),
        ("cos_sin", {"cos_sin": ones(8, DIM).double()}),
        ("cos_sin", {"cos_sin": ones(DIM, 8).T}),
        ("q_norm", {"q_norm": ones(DIM - 1)}),
        ("k_norm", {"k_norm": ones(1, DIM)}),
        ("positions", {"qkv": ones(ROWS + 1, QKV)}),
        ("k_pages", {"kv": pages(8)}),
    ],
)
def test_of_kv_append(native: Library, batch: Batch, says: str, change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {
        "qkv": ones(ROWS, QKV), "num_heads": HEADS, "cos_sin": ones(8, DIM), "kv": pages(), "batch": batch,
        "q_norm": ones(DIM), "k_norm": ones(DIM), "eps": 1e-5,
    }  # fmt: skip
    native.kv_append(**arguments)
    with pytest.raises(ValueError, match=rf"^{says}:"):
        native.kv_append(**{**arguments, **change})


def test_of_attention(native: Library, batch: Batch) -> None:
    for q in (ones(ROWS, HEADS, DIM * 2), ones(ROWS, HEADS + 1, DIM), ones(ROWS, DIM, HEADS).transpose(1, 2)):
        with pytest.raises(ValueError, match=r"^q:"):
            native.paged_attention(q, pages(), batch, 1.0, None)
    with pytest.raises(ValueError, match=r"^context_lens:"):
        native.paged_attention(
            ones(ROWS, HEADS, DIM), pages(), replace(batch, context_lens=batch.context_lens[1:]), 1.0, None
        )


@pytest.mark.parametrize(
    ("says", "change"),
    [
        ("a", lambda layer: {"layer": replace(layer, a=layer.a[:, :1].contiguous())}),
        ("a", lambda layer: {"x": ones(ROWS, 21)}),
        ("b", lambda layer: {"layer": replace(layer, b=layer.b[1:])}),
        ("slice_offsets", lambda layer: {"layer": replace(layer, slice_offsets=(0, 20, 16))}),
        ("slice_offsets", lambda layer: {"y": ones(ROWS, 17)}),
        ("y", lambda layer: {"y": ones(ROWS - 1, 16)}),
    ],
)
def test_of_lora(
    native: Library,
    says: str,
    change: Callable[[LoraLayer], dict[str, Any]],
    generator: torch.Generator,
) -> None:
    plan = library.make_plan(make_batch([1] * ROWS, [1] * ROWS, [0] * ROWS, generator))
    layer = make_lora_layer([[2, 2]], 20, [10, 6], generator, torch.float32)
    arguments: dict[str, Any] = {"y": ones(ROWS, 16), "x": ones(ROWS, 20), "layer": layer, "plan": plan}
    native.lora(**arguments)
    with pytest.raises(ValueError, match=rf"^{says}:"):
        native.lora(**{**arguments, **change(layer)})


@pytest.mark.parametrize(
    ("says", "change"),
    [
        ("input_norm", {"input_norm": ones(HIDDEN + 1)}),
        ("k_norm", {"k_norm": ones(DIM * 2)}),
        ("qkv", {"qkv": (QKV + DIM, HIDDEN)}),
        ("o", {"o": (HIDDEN, HEADS * DIM + 1)}),
        ("gate_up", {"gate_up": (2 * INNER + 2, HIDDEN)}),
    ],
)
def test_of_a_decoder_once(says: str, change: dict[str, Any], generator: torch.Generator) -> None:
    ops = CpuOps()
    assert ops._native is not None

    def layer(**changed: Any) -> DecoderLayer:
        parts = {
            "input_norm": ones(HIDDEN), "qkv": (QKV, HIDDEN), "q_norm": ones(DIM), "k_norm": ones(DIM),
            "o": (HIDDEN, HEADS * DIM), "post_norm": ones(HIDDEN), "gate_up": (2 * INNER, HIDDEN),
            "down": (HIDDEN, INNER), **changed,
        }  # fmt: skip
        # Where the CPU computes in another way as well, the native form is looked at all the same.
        return DecoderLayer(
            **{
                name: ops.pack_linear(ones(*part), None) if isinstance(part, tuple) else part
                for name, part in parts.items()
            }
        )

    def describe(decoder: Decoder, lora: list[LoraLayers] | None = None) -> None:
        assert ops._native is not None
        assert ops._native.describe(decoder, [pages()], lora, 8) is not None

    decoder = Decoder([layer()], ones(HIDDEN), ones(8, DIM), HEADS, 1.0, None, "silu", 1e-5)
    describe(decoder)
    with pytest.raises(ValueError, match=rf"^{says}:"):
        describe(replace(decoder, layers=[layer(**change)]))
    with pytest.raises(ValueError, match=r"^cos_sin:"):
        describe(replace(decoder, cos_sin=ones(8, DIM * 2)))
    with pytest.raises(ValueError, match=r"^a:"):
        describe(decoder, [LoraLayers(o=make_lora_layer([[2]], HIDDEN, [HIDDEN], generator, torch.float32))])
