"""A Hugging Face model directory: config.json, safetensors (one file or shards with an index), tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from model_server.model_config import ModelConfig
from model_server.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class HuggingFaceDirectory:
    """See `ModelFiles`."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError or ValueError naming the file that is missing or malformed."""
        self._path = path
        generation = read_json(path / "generation_config.json") if (path / "generation_config.json").exists() else None
        self.config = ModelConfig.from_hf(read_json(path / "config.json"), generation, path.resolve().name)
        self._shards = self._find_shards()
        self.num_tensors = sum(len(names) for names in self._shards.values())

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_directory(self._path)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for shard, names in self._shards.items():
            with _open(shard) as file:
                present = set(file.keys())
                for name in names:
                    if name not in present:
                        raise ValueError(f"{shard}: {_INDEX} promises {name!r}, which is not there")
                    yield name, file.get_tensor(name)

    def _find_shards(self) -> dict[Path, list[str]]:
        index = self._path / _INDEX
        if index.exists():
            shards: dict[Path, list[str]] = {}
            for name, shard in read_json(index)["weight_map"].items():
                shards.setdefault(self._path / shard, []).append(name)
            missing = [shard.name for shard in shards if not shard.exists()]
            if missing:
                raise FileNotFoundError(f"{self._path} lacks {', '.join(missing)}, named in {_INDEX}")
            return shards
        single = self._path / _SINGLE
        if not single.exists():
            raise FileNotFoundError(f"{self._path} has neither {_SINGLE} nor {_INDEX}")
        with _open(single) as file:
            return {single: list(file.keys())}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises FileNotFoundError, or ValueError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
