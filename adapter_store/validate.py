"""Decides whether two files are a LoRA adapter that can be served exactly; nothing enters the store otherwise."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from protos.adapter_format import CONFIG_FILE, TENSORS_FILE, AdapterConfig, parse_config
from protos.errors import invalid_argument, quote
from protos.safetensors_header import ITEM_BYTES, ModuleShape, TensorEntry, module_shapes, read_header

FILES = (CONFIG_FILE, TENSORS_FILE)
_MAX_TARGETS = 64
# A value is infinite or not a number when all its exponent bits are set.
_EXPONENT_BITS = {"F32": 0x7F80_0000, "F16": 0x7C00, "BF16": 0x7F80}
_READ_BYTES = 1024 * 1024


@dataclass(frozen=True)
class AdapterFacts:
    """What a valid adapter's files say about it."""

    base_model: str  # empty: not stated
    max_rank: int
    target_modules: tuple[str, ...]  # last path components of the modules that have tensors, sorted
    num_parameters: int
    unmatched_patterns: tuple[str, ...] = ()  # rank and alpha patterns that match no module of the file


def check_file_names(names: Collection[str]) -> None:
    """INVALID_ARGUMENT naming the file unless `names` are an adapter's two files, each once."""
    for name in sorted(set(names)):
        if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl")):
            raise invalid_argument(
                quote(name)[1:-1], f"pickled weights can run code and are never read; save them as {TENSORS_FILE}"
            )
        if name not in FILES:
            raise invalid_argument(quote(name)[1:-1], f"not a file of an adapter; only {' and '.join(FILES)} are kept")
    for name in FILES:
        if name not in names:
            raise invalid_argument(name, "the file is missing")
    if len(names) != len(FILES):
        raise invalid_argument("header.files", "a file is named twice")


def validate(config: bytes, tensors: Path) -> AdapterFacts:
    """The facts of the adapter in these two files; INVALID_ARGUMENT naming file and field when it cannot be served.

    Whether it fits a base model is for the model server to say: the store knows none.
    """
    adapter = parse_config(config)
    with tensors.open("rb") as file:
        header = read_header(file)
        shapes = module_shapes(header)
        _check_ranks(adapter, shapes)
        _check_layers_agree(shapes)
        _check_finite(file, header)
    targets = tuple(sorted({module.rpartition(".")[2] for module in shapes}))
    if len(targets) > _MAX_TARGETS:
        raise invalid_argument(TENSORS_FILE, f"adapts {len(targets)} kinds of module, at most {_MAX_TARGETS} are taken")
    return AdapterFacts(
        base_model=adapter.base_model,
        max_rank=max(shape.rank for shape in shapes.values()),
        target_modules=targets,
        num_parameters=sum(shape.rank * (shape.in_features + shape.out_features) for shape in shapes.values()),
        unmatched_patterns=tuple(adapter.unmatched_patterns(shapes)),
    )


def _check_ranks(adapter: AdapterConfig, shapes: Mapping[str, ModuleShape]) -> None:
    for module, shape in shapes.items():
        rank = adapter.rank_of(module)
        if shape.rank != rank:
            raise invalid_argument(
                f"{TENSORS_FILE}/{module}", f"its tensors are of rank {shape.rank}, {CONFIG_FILE} says {rank}"
            )


def _check_layers_agree(shapes: Mapping[str, ModuleShape]) -> None:
    """A module has the same in and out features in every layer."""
    first: dict[str, str] = {}
    for module, shape in shapes.items():
        other = first.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", module), module)
        ours, theirs = (shape.in_features, shape.out_features), (shapes[other].in_features, shapes[other].out_features)
        if ours != theirs:
            raise invalid_argument(f"{TENSORS_FILE}/{module}", f"its (in, out) is {ours}, that of {other} is {theirs}")


def _check_finite(file: BinaryIO, header: Mapping[str, TensorEntry]) -> None:
    for name, entry in header.items():
        bits = np.dtype(f"<u{ITEM_BYTES[entry.dtype]}")
        exponent = bits.type(_EXPONENT_BITS[entry.dtype])
        file.seek(entry.start)
        for start in range(entry.start, entry.end, _READ_BYTES):
            values = np.frombuffer(file.read(min(_READ_BYTES, entry.end - start)), dtype=bits)
            if ((values & exponent) == exponent).any():
                raise invalid_argument(f"{TENSORS_FILE}/{quote(name)[1:-1]}", "holds NaN or infinite values")
