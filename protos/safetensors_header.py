"""The header of a safetensors file, read without NumPy or torch, so that bf16 needs neither.

Format: 8 bytes little-endian header length, a JSON object of that length, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from protos.adapter_format import TENSORS_FILE, parse_key
from protos.errors import invalid_argument, quote

# Enough for a hundred thousand tensors; a length beyond it is damage.
MAX_HEADER_BYTES = 16 * 1024 * 1024
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the file: `dtype` as safetensors writes it, `start` and `end` in bytes from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class ModuleShape:
    """One adapted module: A is [rank, in_features], B is [out_features, rank]."""

    in_features: int
    out_features: int
    rank: int


def read_header(file: BinaryIO) -> dict[str, TensorEntry]:
    """The tensors of an adapter's safetensors file, by name.

    INVALID_ARGUMENT (field "adapter_model.safetensors", with "/<tensor>" where one is at fault) when the file is
    truncated, malformed, without tensors, or holds a dtype other than F32, F16 or BF16. Reads only the header.
    """
    size = file.seek(0, 2)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise _refuse(f"truncated or not a safetensors file: {size} bytes, header of {length if size >= 8 else '?'}")
    try:
        header = json.loads(file.read(length).decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _refuse(f"not a safetensors file: its header is not JSON ({quote(str(error))[1:-1]})") from error
    if not isinstance(header, dict):
        raise _refuse("not a safetensors file: its header is not an object")
    header.pop("__metadata__", None)
    if not header:
        raise _refuse("the file holds no tensors")
    entries = {name: _entry(name, value, 8 + length) for name, value in header.items()}
    position = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            raise _refuse("its bytes do not follow those of the tensor before", name)
        position = entry.end
    if position != size:
        raise _refuse(f"{'truncated' if position > size else 'too long'}: {size} bytes, its header says {position}")
    return entries


def module_shapes(header: Mapping[str, TensorEntry]) -> dict[str, ModuleShape]:
    """Each adapted module's shape, by module path.

    INVALID_ARGUMENT naming the tensor when a name is not that of a LoRA factor, a factor is missing or there twice,
    A and B do not fit each other, or two adapters' tensors are mixed in one file.
    """
    factors: dict[tuple[str, str], str] = {}
    adapter_names: dict[str | None, str] = {}
    for name, entry in header.items():
        key = parse_key(name)
        if len(entry.shape) != 2 or 0 in entry.shape:
            raise _refuse(f"a LoRA factor is a matrix, not of shape {list(entry.shape)[:8]}", name)
        if (other := factors.setdefault((key.module, key.factor), name)) != name:
            raise _refuse(f"names the same factor as {quote(other)}", name)
        adapter_names.setdefault(key.adapter_name, name)
    if len(adapter_names) > 1:
        raise _refuse(f"tensors of more than one adapter in one file: {quote(sorted(adapter_names.values()))}")
    shapes: dict[str, ModuleShape] = {}
    for (module, factor), name in factors.items():
        partner = factors.get((module, "B" if factor == "A" else "A"))
        if partner is None:
            raise _refuse(f"has no partner lora_{'B' if factor == 'A' else 'A'}", name)
        if factor == "A":
            (rank, in_features), (out_features, rank_of_b) = header[name].shape, header[partner].shape
            if rank != rank_of_b:
                a, b = list(header[name].shape), list(header[partner].shape)
                raise _refuse(f"A {a} and B {b} do not fit: A is [rank, in], B is [out, rank]", name)
            shapes[module] = ModuleShape(in_features, out_features, rank)
    return shapes


def _entry(name: str, value: Any, offset: int) -> TensorEntry:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
            pass
        case _:
            raise _refuse("not a safetensors entry", name)
    if dtype not in ITEM_BYTES:
        raise _refuse(f"dtype {quote(dtype)} is not supported, only F32, F16 and BF16", name)
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**40 for n in shape) or len(shape) > 8:
        raise _refuse("its shape is malformed", name)
    if start < 0 or end - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise _refuse(f"{end - start} bytes do not hold {dtype} {list(shape)}", name)
    return TensorEntry(dtype, tuple(shape), offset + start, offset + end)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def _refuse(description: str, tensor: str | None = None) -> Exception:
    field = TENSORS_FILE if tensor is None else f"{TENSORS_FILE}/{quote(tensor)[1:-1]}"
    return invalid_argument(field, description)
