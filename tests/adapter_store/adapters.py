"""Small adapters as bytes, and the calls that bring them into a store."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import AsyncIterator, Mapping
from hashlib import sha256
from typing import Any

from protos import adapter_store_pb2 as pb
from protos.adapter_format import CONFIG_FILE, TENSORS_FILE

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I8": 1}
Q_PROJ = "base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{factor}.weight"

Tensor = tuple[str, tuple[int, ...], bytes]


def config(**overrides: Any) -> bytes:
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    return json.dumps(plain | overrides).encode()


def tensor(shape: tuple[int, ...], dtype: str = "F32", fill: int = 0) -> Tensor:
    """A tensor whose every byte is `fill`."""
    return dtype, shape, bytes([fill]) * (math.prod(shape) * ITEM_BYTES[dtype])


def lora(rank: int = 4, layers: int = 2, width: int = 8, key: str = Q_PROJ, fill: int = 0) -> dict[str, Tensor]:
    return {
        key.format(layer=layer, factor=factor): tensor((rank, width) if factor == "A" else (width, rank), fill=fill)
        for layer in range(layers)
        for factor in "AB"
    }


def safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def adapter(fill: int = 0, **overrides: Any) -> dict[str, bytes]:
    """A valid adapter's files; another `fill` is another revision."""
    return {CONFIG_FILE: config(**overrides), TENSORS_FILE: safetensors(lora(fill=fill))}


def header(adapter_id: str, files: Mapping[str, bytes], alias: str = "") -> pb.PutRequest:
    entries = [pb.FileEntry(name=n, size=len(d), sha256=sha256(d).hexdigest()) for n, d in files.items()]
    return pb.PutRequest(header=pb.PutHeader(adapter_id=adapter_id, files=entries, alias=alias))


async def put(stub: Any, adapter_id: str, files: Mapping[str, bytes], alias: str = "") -> pb.PutResponse:
    async def requests() -> AsyncIterator[pb.PutRequest]:
        yield header(adapter_id, files, alias)
        for data in files.values():
            for start in range(0, len(data), 1024 * 1024):
                yield pb.PutRequest(chunk=data[start : start + 1024 * 1024])

    response: pb.PutResponse = await stub.Put(requests())
    return response
