"""The header of a safetensors file, and the modules its tensors adapt."""

from __future__ import annotations

import io
import json
import struct
from typing import Any

import pytest

from protos.errors import ServiceError
from protos.safetensors_header import ModuleShape, TensorEntry, module_shapes, read_header
from tests.adapter_store.adapters import Q_PROJ, lora, safetensors, tensor

FILE = "adapter_model.safetensors"


def with_header(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: Any = "F32", shape: Any = (1, 1), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_entries_say_where_the_bytes_are() -> None:
    file = safetensors({"a": tensor((2, 3), "BF16"), "b": tensor((4,), "F32")}, metadata={"format": "pt"})
    start = len(file) - 28
    assert read_header(io.BytesIO(file)) == {
        "a": TensorEntry("BF16", (2, 3), start, start + 12),
        "b": TensorEntry("F32", (4,), start + 12, start + 28),
    }


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "truncated"),
        (b"\x00" * 7, "truncated"),
        (struct.pack("<Q", 2**63) + b"{}", "truncated"),
        (safetensors(lora())[:40], "truncated"),  # FIL-11: inside the header
        (safetensors(lora())[:-1], "truncated"),
        (safetensors(lora()) + b"x", "too long"),
        (with_header({}), "no tensors"),  # FIL-07
        (with_header({"__metadata__": {"format": "pt"}}), "no tensors"),
        (with_header(b"{"), "not JSON"),
        (with_header(b"\xff\xfe"), "not JSON"),
        (with_header(b"[" * 100_000), "not JSON"),
        (with_header([]), "not an object"),
        (b"PK\x03\x04" + b"\x00" * 60, "not a safetensors file|truncated"),
        (with_header(b'{"x": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}, "x": 1}', b"1234"), "twice"),
        (with_header({"x": 1}), "not a safetensors entry"),
        (with_header({"x": entry(dtype="F64", offsets=(0, 8))}, b"12345678"), "'F64' is not supported"),
        (with_header({"x": entry(dtype="I8", offsets=(0, 1))}, b"1"), "'I8' is not supported"),
        (with_header({"x": entry(shape=[-1, -1])}, b"1234"), "malformed"),
        (with_header({"x": entry(shape=[2, 2])}, b"1234"), "do not hold"),
        (with_header({"x": entry(offsets=(-4, 0))}, b"1234"), "do not hold"),
        (with_header({"x": entry(offsets=(4, 8))}, b"12345678"), "do not follow"),
        (with_header({"x": entry(), "y": entry()}, b"1234"), "do not follow"),  # overlapping
    ],
)
def test_damage_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(ServiceError, match=says) as raised:
        read_header(io.BytesIO(data))
    assert raised.value.field in (FILE, f"{FILE}/x", f"{FILE}/y")


def shapes_of(tensors: dict[str, Any]) -> dict[str, ModuleShape]:
    return module_shapes(read_header(io.BytesIO(safetensors(tensors))))


def test_module_shapes_come_from_both_factors() -> None:
    tensors = {"m.q.lora_A.weight": tensor((4, 8)), "m.q.lora_B.weight": tensor((16, 4))}
    assert shapes_of(tensors) == {"m.q": ModuleShape(in_features=8, out_features=16, rank=4)}


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"m.q.lora_A.weight": tensor((4, 8))}, "no partner lora_B"),
        ({"m.q.lora_B.weight": tensor((8, 4))}, "no partner lora_A"),
        # CFG-19: orientation is the format's, whatever else the shapes would allow
        ({"m.q.lora_A.weight": tensor((8, 4)), "m.q.lora_B.weight": tensor((4, 8))}, None),
        ({"m.q.lora_A.weight": tensor((8, 4)), "m.q.lora_B.weight": tensor((4, 16))}, "do not fit"),
        ({"m.q.lora_A.weight": tensor((4,)), "m.q.lora_B.weight": tensor((8, 4))}, "is a matrix"),
        ({"m.q.lora_A.weight": tensor((0, 8)), "m.q.lora_B.weight": tensor((8, 0))}, "is a matrix"),
        (
            {"m.q.lora_A.weight": tensor((4, 8)), "_orig_mod.m.q.lora_A.weight": tensor((4, 8))},
            "names the same factor",
        ),
        (  # FIL-05: two adapters in one file
            lora(key="m.{layer}.lora_{factor}.one.weight") | lora(key="n.{layer}.lora_{factor}.two.weight"),
            "more than one adapter",
        ),
        (lora() | {"base_model.model.lm_head.weight": tensor((8, 8))}, "not a LoRA factor"),  # VOC-01
    ],
)
def test_factors_must_come_in_fitting_pairs(tensors: dict[str, Any], says: str | None) -> None:
    if says is None:
        assert shapes_of(tensors)["m.q"].rank == 8
        return
    with pytest.raises(ServiceError, match=says) as raised:
        shapes_of(tensors)
    assert raised.value.field is not None
    assert raised.value.field.startswith(FILE)


def test_one_adapter_name_in_every_key_is_taken() -> None:  # FIL-05
    assert len(shapes_of(lora(key=Q_PROJ.replace(".weight", ".default.weight")))) == 2
