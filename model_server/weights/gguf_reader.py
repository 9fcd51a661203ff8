"""gguf's reader, with its two slow paths replaced: a vocabulary is an array of a hundred thousand strings, and reading each
as three numpy views took longer than loading the model; and every view of a memory map costs twice that of an array."""

from __future__ import annotations

import struct
from typing import Any

import gguf
import numpy as np

_LENGTH = {gguf.GGUFEndian.LITTLE: struct.Struct("<Q"), gguf.GGUFEndian.BIG: struct.Struct(">Q")}


class GgufReader(gguf.GGUFReader):  # type: ignore[misc]
    """The same fields and tensors; only the lengths of strings in arrays are not kept as parts of their own."""

    @property
    def data(self) -> np.ndarray:
        """The file's bytes, mapped."""
        return self._data

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        self._data = np.asarray(mapped)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        value_type, array, string = gguf.GGUFValueType, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING
        if value_type(raw_type) is not array or value_type(self._get(orig_offs, np.uint32)[0]) is not string:
            parts: tuple[int, list[Any], list[int], list[Any]] = super()._get_field_parts(orig_offs, raw_type)
            return parts
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        data = self.data
        buffer: Any = data
        unpack = _LENGTH[self.endianess].unpack_from
        strings: list[Any] = []
        offset = orig_offs + 12
        for _ in range(count):
            try:
                (length,) = unpack(buffer, offset)
            except struct.error as error:
                raise ValueError("an array of strings ends outside the file") from error
            offset += 8
            strings.append(data[offset : offset + length])
            offset += length
        return offset - orig_offs, strings, list(range(count)), [array, string]
