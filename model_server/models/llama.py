"""The Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen3. One forward pass for a step of many requests.

Projections that share an input are one matrix: q, k, v and gate, up. LoRA follows the same grouping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.layouts import Batch, Decoder, DecoderLayer, KVLayer, LoraLayers
from kernels.ops import Ops
from model_server.model_config import ModelConfig

_EMBEDDING = "model.embed_tokens.weight"
_NORM = "model.norm.weight"
_HEAD = "lm_head.weight"

# Group -> (input features, ((module, output features), ...)) in slice order.
LoraGroups = dict[str, tuple[int, tuple[tuple[str, int], ...]]]


def lora_groups(config: ModelConfig) -> LoraGroups:
    """How a layer's projections are grouped: the fields of `kernels.layouts.LoraLayers`, with their slices. Modules are
    named as after "model.layers.N."."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "qkv": (
            hidden,
            (("self_attn.q_proj", q_size), ("self_attn.k_proj", kv_size), ("self_attn.v_proj", kv_size)),
        ),
        "o": (q_size, (("self_attn.o_proj", hidden),)),
        "gate_up": (hidden, (("mlp.gate_proj", inner), ("mlp.up_proj", inner))),
        "down": (inner, (("mlp.down_proj", hidden),)),
    }


class LlamaModel:
    """Weights, packed for one backend, and the forward pass. Holds no state of any request."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Iterable[tuple[str, Tensor]],
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Reads `tensors` once, in any order, packing each matrix as soon as its parts are there; calls
        `progress(done, total)` after each. Raises ValueError naming a tensor that is missing, unknown,
        repeated or misshapen."""
        self._ops = ops
        weights = _Weights(config, ops, dtype, device)
        for count, (name, tensor) in enumerate(tensors, 1):
            weights.add(name, tensor)
            if progress is not None:
                progress(count, max(count, weights.num_expected))
        weights.check_complete()
        self._embedding = weights.vectors[_EMBEDDING]
        self._head = ops.pack_linear(self._embedding, None) if config.tie_word_embeddings else weights.packed[_HEAD]
        self._decoder = Decoder(
            [weights.layer(index) for index in range(config.num_layers)],
            weights.vectors[_NORM],
            rotary_table(config).to(device),
            config.num_heads,
            config.head_dim**-0.5,
            config.sliding_window,
            config.activation,
            config.rms_norm_eps,
        )

    def forward(
        self,
        token_ids: Tensor,
        batch: Batch,
        kv: Sequence[KVLayer],
        lora: Sequence[LoraLayers] | None,
        logit_rows: Tensor,
    ) -> Tensor:
        """token_ids [T] int64, logit_rows [S] int64 -> logits [S, V] fp32. Writes this step's K and V into `kv`, one
        per layer. `ops.plan(batch)` has run. `lora` (one per layer) is not looked at when no row has an adapter."""
        hidden = self._embedding.index_select(0, token_ids)  # [T, C], the residual stream
        normed = self._ops.decoder(self._decoder, hidden, kv, lora, batch)
        return self._ops.logits(normed.index_select(0, logit_rows), self._head)


def rotary_table(config: ModelConfig) -> Tensor:
    """[context_length, head_dim] fp32: the cosines of every position's angles, then their sines."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / config.rope_theta**half  # [D / 2], radians per position
    scaling = config.rope_scaling or {"rope_type": "default"}
    if scaling["rope_type"] == "linear":
        frequencies /= scaling["factor"]
    elif scaling["rope_type"] == "factors":
        frequencies /= torch.tensor(scaling["factors"], dtype=torch.float32)
    elif scaling["rope_type"] == "llama3":
        frequencies = _llama3_frequencies(frequencies, scaling)
    angles = torch.arange(config.context_length).float().unsqueeze(1) * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def _llama3_frequencies(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    stretched = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(between, blended, stretched)


class _Weights:
    """Takes tensors in any order; a fused matrix is filled part by part and packed when whole, its parts dropped."""

    def __init__(self, config: ModelConfig, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._ops = config, ops
        self._dtype, self._device = dtype, device
        self.vectors: dict[str, Tensor] = {}
        self.packed: dict[str, Any] = {}
        hidden, vocab = config.hidden_size, config.vocab_size
        # Name -> shape of what is kept as it is; name -> (matrix, first row, shape) of what becomes part of a matrix.
        self._plain: dict[str, tuple[int, ...]] = {_EMBEDDING: (vocab, hidden), _NORM: (hidden,)}
        self._parts: dict[str, tuple[str, int, tuple[int, ...]]] = {}
        self._buffers: dict[str, tuple[Tensor, Tensor | None]] = {}
        self._shapes: dict[str, tuple[int, int, bool]] = {}  # matrix -> output, input features, has a bias
        self._missing: dict[str, set[str]] = {}
        for layer in range(config.num_layers):
            self._expect_layer(f"model.layers.{layer}.")
        if not config.tie_word_embeddings:
            self._expect_matrix(_HEAD, hidden, ((_HEAD.removesuffix(".weight"), vocab),), bias=False)

    @property
    def num_expected(self) -> int:
        return len(self._plain) + len(self._parts)

    def _expect_layer(self, prefix: str) -> None:
        config = self._config
        for norm in ("input_layernorm", "post_attention_layernorm"):
            self._plain[f"{prefix}{norm}.weight"] = (config.hidden_size,)
        if config.qk_norm:
            for norm in ("q_norm", "k_norm"):
                self._plain[f"{prefix}self_attn.{norm}.weight"] = (config.head_dim,)
        biases = {"qkv": config.attention_bias, "o": config.attention_output_bias}
        for group, (in_features, slices) in lora_groups(config).items():
            modules = tuple((prefix + module, out_features) for module, out_features in slices)
            self._expect_matrix(prefix + group, in_features, modules, biases.get(group, False))

    def _expect_matrix(self, matrix: str, in_features: int, modules: Sequence[tuple[str, int]], bias: bool) -> None:
        row = 0
        names = self._missing[matrix] = set[str]()
        for module, out_features in modules:
            self._parts[f"{module}.weight"] = matrix, row, (out_features, in_features)
            names.add(f"{module}.weight")
            if bias:
                self._parts[f"{module}.bias"] = matrix, row, (out_features,)
                names.add(f"{module}.bias")
            row += out_features
        self._shapes[matrix] = row, in_features, bias

    def add(self, name: str, tensor: Tensor) -> None:
        if name in self._plain:
            _check_shape(name, tensor, self._plain[name])
            if name in self.vectors:
                raise ValueError(f"tensor {name!r} is there twice")
            self.vectors[name] = tensor.to(self._device, self._dtype)
            return
        if name not in self._parts:
            # A tied head stored again, and tables older checkpoints carry, are known to be redundant.
            if name == _HEAD or name.endswith("rotary_emb.inv_freq"):
                return
            raise ValueError(f"tensor {name!r} is not one of this model's")
        matrix, row, shape = self._parts[name]
        _check_shape(name, tensor, shape)
        if name not in self._missing[matrix]:
            raise ValueError(f"tensor {name!r} is there twice")
        weight, bias = self._buffer(matrix)
        target = weight if len(shape) == 2 else bias
        assert target is not None
        target[row : row + shape[0]].copy_(tensor)
        self._missing[matrix].remove(name)
        if not self._missing[matrix]:
            del self._buffers[matrix]
            self.packed[matrix] = self._ops.pack_linear(weight, bias)

    def _buffer(self, matrix: str) -> tuple[Tensor, Tensor | None]:
        if matrix not in self._buffers:
            out_features, in_features, has_bias = self._shapes[matrix]
            weight = torch.empty(out_features, in_features, dtype=self._dtype, device=self._device)
            bias = torch.empty(out_features, dtype=self._dtype, device=self._device) if has_bias else None
            self._buffers[matrix] = weight, bias
        return self._buffers[matrix]

    def check_complete(self) -> None:
        missing = sorted(self._plain.keys() - self.vectors.keys()) + sorted(set().union(*self._missing.values()))
        if missing:
            raise ValueError(f"the model's files lack {len(missing)} tensors, the first is {missing[0]!r}")

    def layer(self, index: int) -> DecoderLayer:
        prefix = f"model.layers.{index}."
        return DecoderLayer(
            input_norm=self.vectors[f"{prefix}input_layernorm.weight"],
            qkv=self.packed[f"{prefix}qkv"],
            q_norm=self.vectors.get(f"{prefix}self_attn.q_norm.weight"),
            k_norm=self.vectors.get(f"{prefix}self_attn.k_norm.weight"),
            o=self.packed[f"{prefix}o"],
            post_norm=self.vectors[f"{prefix}post_attention_layernorm.weight"],
            gate_up=self.packed[f"{prefix}gate_up"],
            down=self.packed[f"{prefix}down"],
        )


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the config says {shape}")
