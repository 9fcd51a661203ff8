"""What a model is: its shapes and variants, read from a Hugging Face config.json or from a GGUF file's metadata.

Both readers refuse what the forward pass would not honour, naming it, instead of computing something else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

_HF_FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}
_GGUF_FAMILIES = {"llama", "qwen2", "qwen3"}
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_SIZES = (
    "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size",
    "context_length",
)  # fmt: skip
# Keys each kind of rotary scaling needs; a kind that is not here is refused.
_ROPE_SCALING_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "factors": ("factors",),
}


@dataclass(frozen=True)
class ModelConfig:
    """One decoder of the Llama family. Sizes in elements, lengths in tokens."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    # {"rope_type": "linear" | "llama3" | "factors", ...}; "factors" holds one divisor per frequency (GGUF).
    rope_scaling: dict[str, Any] | None = None
    sliding_window: int | None = None  # positions a token sees, itself included
    attention_bias: bool = False  # on q, k and v
    attention_output_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    activation: str = "silu"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        for field in _SIZES:
            _require(getattr(self, field) > 0, f"{field} must be positive, not {getattr(self, field)}")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}",
        )
        _require(self.head_dim % 2 == 0, f"head_dim {self.head_dim} is odd")
        if self.rope_scaling is not None:
            kind = self.rope_scaling.get("rope_type")
            _require(kind in _ROPE_SCALING_KEYS, f"rope_scaling type {kind!r} is not supported")
            for key in _ROPE_SCALING_KEYS[str(kind)]:
                _require(key in self.rope_scaling, f"rope_scaling of type {kind!r} lacks {key!r}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None, name: str) -> ModelConfig:
        """From config.json and, when there is one, generation_config.json (its end-of-sequence ids win).

        Raises ValueError naming the architecture or field that is missing or not supported.
        """
        family = config.get("model_type")
        supported = ", ".join(sorted(_HF_FAMILIES))
        _require(family in _HF_FAMILIES, f"model_type {family!r} is not supported; supported: {supported}")
        _require(not config.get("quantization_config"), "quantization_config: quantised checkpoints are not supported")
        _require(not config.get("mlp_bias"), "mlp_bias is not supported")
        partial = config.get("partial_rotary_factor") or (config.get("rope_parameters") or {}).get(
            "partial_rotary_factor"
        )
        _require(partial in (None, 1, 1.0), f"partial_rotary_factor {partial} is not supported")
        hidden_size, num_heads = _int(config, "hidden_size"), _int(config, "num_attention_heads")
        activation = config.get("hidden_act", "silu")
        _require(activation in _ACTIVATIONS, f"hidden_act {activation!r} is not supported")
        rope_theta, rope_scaling = _hf_rope(config)
        generation = generation or {}
        eos = generation.get("eos_token_id", config.get("eos_token_id"))
        bias = bool(config.get("attention_bias", False))
        return cls(
            name=name,
            num_layers=_int(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=_int(config, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            # transformers' Qwen3 has 128 where the file is silent.
            head_dim=config.get("head_dim") or (128 if family == "qwen3" else hidden_size // num_heads),
            vocab_size=_int(config, "vocab_size"),
            context_length=_int(config, "max_position_embeddings"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            sliding_window=_hf_sliding_window(config),
            # Qwen2 always has it, on q, k and v alone; Llama and Qwen3 put theirs on the output too.
            attention_bias=family == "qwen2" or (bias and family != "mistral"),
            attention_output_bias=bias and family in ("llama", "qwen3"),
            qk_norm=family == "qwen3",
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            activation=_ACTIVATIONS[activation],
            eos_token_ids=_ids(eos),
            bos_token_id=config.get("bos_token_id"),
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        tensor_names: Collection[str],
        name: str,
        rope_factors: tuple[float, ...] | None = None,
    ) -> ModelConfig:
        """From a GGUF file's key-value pairs; `rope_factors` is its tensor rope_freqs.weight, when it has one.

        Raises ValueError naming the architecture or key that is missing or not supported.
        """
        family = metadata.get("general.architecture")
        supported = ", ".join(sorted(_GGUF_FAMILIES))
        _require(family in _GGUF_FAMILIES, f"general.architecture {family!r} is not supported; supported: {supported}")

        def get(key: str, default: Any = None) -> Any:
            value = metadata.get(f"{family}.{key}", default)
            _require(value is not None, f"the GGUF file lacks {family}.{key}")
            return value

        _require(not get("expert_count", 0), f"{family}.expert_count: mixtures of experts are not supported")
        hidden_size, num_heads = int(get("embedding_length")), int(get("attention.head_count"))
        head_dim = int(get("attention.key_length", hidden_size // num_heads))
        for key in ("attention.value_length", "rope.dimension_count"):
            size = get(key, head_dim)
            _require(size == head_dim, f"{family}.{key} {size} differs from the head's {head_dim}: not supported")
        return cls(
            name=name,
            num_layers=int(get("block_count")),
            hidden_size=hidden_size,
            intermediate_size=int(get("feed_forward_length")),
            num_heads=num_heads,
            num_kv_heads=int(get("attention.head_count_kv", num_heads)),
            head_dim=head_dim,
            vocab_size=int(get("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())))),
            context_length=int(get("context_length")),
            rms_norm_eps=float(get("attention.layer_norm_rms_epsilon")),
            rope_theta=float(get("rope.freq_base", 10000.0)),
            rope_scaling=_gguf_rope_scaling(metadata, str(family), rope_factors),
            sliding_window=metadata.get(f"{family}.attention.sliding_window") or None,
            attention_bias="blk.0.attn_q.bias" in tensor_names,
            attention_output_bias="blk.0.attn_output.bias" in tensor_names,
            qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
            tie_word_embeddings="output.weight" not in tensor_names,
            eos_token_ids=tuple(
                dict.fromkeys(
                    int(metadata[key])
                    for key in (f"tokenizer.ggml.{role}_token_id" for role in ("eos", "eot", "eom"))
                    if key in metadata
                )
            ),
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _int(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    _require(isinstance(value, int), f"config.json: {key} must be an integer, not {value!r}")
    return int(config[key])


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _hf_rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    # transformers 5 writes `rope_parameters` with the base inside; before, `rope_scaling` stood beside `rope_theta`.
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    return theta, None if kind == "default" else {"rope_type": kind, **rope}


def _hf_sliding_window(config: Mapping[str, Any]) -> int | None:
    """The one window every layer shares, or None; ValueError where layers differ."""
    window = config.get("sliding_window")
    if window is None or config["model_type"] == "llama" or not config.get("use_sliding_window", True):
        return None
    num_layers = int(config["num_hidden_layers"])
    types = config.get("layer_types")
    if types is None and config["model_type"] != "mistral":
        full = min(int(config.get("max_window_layers", num_layers)), num_layers)
        types = ["full_attention"] * full + ["sliding_attention"] * (num_layers - full)
    kinds = set(types or ["sliding_attention"])
    _require(len(kinds) == 1, "sliding_window on some layers only is not supported")
    return int(window) if kinds == {"sliding_attention"} else None


def _gguf_rope_scaling(
    metadata: Mapping[str, Any], family: str, rope_factors: tuple[float, ...] | None
) -> dict[str, Any] | None:
    kind = metadata.get(f"{family}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ValueError(f"{family}.rope.scaling.type {kind!r} is not supported")
    if rope_factors is not None:
        _require(kind == "none", f"{family}.rope.scaling.type {kind!r} together with rope_freqs is not supported")
        return {"rope_type": "factors", "factors": list(rope_factors)}
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(metadata[f"{family}.rope.scaling.factor"])}
    return None
