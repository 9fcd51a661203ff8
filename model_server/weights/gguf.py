"""A GGUF file: metadata as config and tokenizer; tensors dequantised one at a time, under their Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from model_server.model_config import ModelConfig
from model_server.tokenizer import Tokenizer
from model_server.weights.gguf_reader import GgufReader
from model_server.weights.gguf_tokenizer import build_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

_TYPES = frozenset({"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"})
_ROPE_FACTORS = "rope_freqs.weight"
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufFile:
    """See `ModelFiles`."""

    def __init__(self, path: Path, name: str) -> None:
        """Raises ValueError naming what is malformed or not supported in the file."""
        try:
            reader = GgufReader(path)
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            raise ValueError(f"{path} is not a whole GGUF file: {error}") from error
        self._metadata: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors if tensor.name != _ROPE_FACTORS}
        for tensor in self._tensors.values():
            kind = tensor.tensor_type.name
            if kind not in _TYPES:
                raise ValueError(f"{path}: {tensor.name} is stored as {kind}, which is not supported")
        factors = next((t.data for t in reader.tensors if t.name == _ROPE_FACTORS), None)
        self.config = ModelConfig.from_gguf(
            self._metadata, self._tensors.keys(), name, None if factors is None else tuple(map(float, factors))
        )
        self.num_tensors = len(self._tensors)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return build_tokenizer(self._metadata)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        import torch  # only who reads weights needs it: the serving process takes the tokenizer and stays without

        permuted = self._metadata["general.architecture"] == "llama"
        for name, stored in self._tensors.items():
            values = np.require(gguf.dequantize(stored.data, stored.tensor_type), np.float32, "W")
            tensor = torch.from_numpy(values)
            if permuted and (match := re.fullmatch(r"blk\.\d+\.attn_(q|k)\.(weight|bias)", name)):
                heads = self.config.num_heads if match[1] == "q" else self.config.num_kv_heads
                tensor = _half_split(tensor, heads)
            yield hf_name(name), tensor


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor. Raises ValueError for one the Llama family does not have."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise ValueError(f"GGUF tensor {name!r} is not supported")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def _half_split(tensor: Tensor, heads: int) -> Tensor:
    """Rows of q or k from llama.cpp's order, rotary pairs adjacent, to ours: first halves, then second halves."""
    pairs = tensor.shape[0] // heads // 2
    return tensor.view(heads, pairs, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
