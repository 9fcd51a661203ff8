"""The adapter artefact as store and model server both read it: names, digest, adapter_config.json, tensor keys.

Ranks and scalings come out exactly as the PEFT that saved the adapter would use them; what would change the served
function in a way loramux does not implement is refused by name, never ignored. Pure and free of torch.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal, NamedTuple

from protos.errors import invalid_argument, quote

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 256 * 1024
ID_RULE = (
    "1 to 128 characters, letters, digits and . _ - / only, starting with a letter or digit, "
    "with no empty, '.' or '..' segment; 'base' is reserved"
)

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_REVISION = re.compile(r"sha256:[0-9a-f]{64}")
# Keys that never change what a trained adapter computes: they describe training, or which modules got tensors (the
# tensors present say that themselves). corda_config and its kin act only through init_lora_weights.
_INERT = frozenset({
    "auto_mapping", "corda_config", "eva_config", "exclude_modules", "inference_mode", "layers_pattern",
    "layers_to_transform", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size",
    "revision", "task_type",
})  # fmt: skip
_READ = frozenset({
    "alpha_pattern", "base_model_name_or_path", "bias", "init_lora_weights", "lora_alpha", "peft_type", "r",
    "rank_pattern", "target_modules", "use_rslora",
})  # fmt: skip
# Initialisations that leave the base weights as they are. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA subtract from them.
_PLAIN_INITS = frozenset({"true", "false", "gaussian", "eva", "orthogonal", "mica"})
_MAX_PATTERNS = 4096
_MAX_PATTERN_QUANTIFIERS = 3
_MAX_PATTERN_CHARS = 512
_MAX_MODULE_CHARS = 256
_MAX_BASE_MODEL_CHARS = 1024


def check_adapter_id(adapter_id: str, field: str = "adapter_id") -> str:
    """`adapter_id` verbatim; INVALID_ARGUMENT stating the rule when it breaks it."""
    if not _ID.fullmatch(adapter_id) or {"", ".", ".."} & set(adapter_id.split("/")) or adapter_id == "base":
        raise invalid_argument(field, f"{quote(adapter_id)} does not follow the rule: {ID_RULE}")
    return adapter_id


def check_alias(alias: str, field: str = "alias") -> str:
    """`alias` verbatim; aliases follow the rule of adapter ids."""
    return check_adapter_id(alias, field)


def check_revision(revision: str, field: str = "revision") -> str:
    """`revision` verbatim; INVALID_ARGUMENT unless it is "sha256:" and 64 lower-case hex digits."""
    if not _REVISION.fullmatch(revision):
        raise invalid_argument(field, f"{quote(revision)} is not 'sha256:' and 64 lower-case hex digits")
    return revision


def revision_digest(files: Iterable[tuple[str, str]]) -> str:
    """The revision of an adapter with these (name, sha256 hex) files: the digest of its canonical manifest."""
    manifest = "".join(f"{digest} {name}\n" for name, digest in sorted(files))
    return f"sha256:{sha256(manifest.encode()).hexdigest()}"


class LoraKey(NamedTuple):
    """A tensor's name, taken apart."""

    module: str  # as the base model names it: "model.layers.0.self_attn.q_proj"
    factor: Literal["A", "B"]
    adapter_name: str | None  # the segment some writers leave in: lora_A.default.weight


def parse_key(key: str) -> LoraKey:
    """Take a tensor name apart; INVALID_ARGUMENT naming the key unless it is a LoRA factor of a linear module.

    Wrappers that are no part of the base's own names are dropped: `base_model.model.` and `_orig_mod.`.
    """
    field = f"{TENSORS_FILE}/{quote(key)[1:-1]}"
    segments = [segment for segment in key.split(".") if segment != "_orig_mod"]
    if segments[:2] == ["base_model", "model"]:
        segments = segments[2:]
    for marker, what in _REFUSED_TENSORS.items():
        if marker in segments:
            raise invalid_argument(field, f"{what} is not supported")
    match segments:
        case [*module, "lora_A" | "lora_B" as factor, "weight"]:
            name = None
        case [*module, "lora_A" | "lora_B" as factor, str(name), "weight"]:
            pass
        case _:
            raise invalid_argument(field, "not a LoRA factor (…lora_A.weight or …lora_B.weight)")
    path = ".".join(module)
    if not all(module) or not module or name == "" or len(path) > _MAX_MODULE_CHARS:
        raise invalid_argument(field, f"no module path of 1 to {_MAX_MODULE_CHARS} characters before the LoRA factor")
    return LoraKey(path, "A" if factor == "lora_A" else "B", name)


_REFUSED_TENSORS = {
    "lora_magnitude_vector": "a DoRA magnitude vector",
    "lora_embedding_A": "LoRA on an embedding",
    "lora_embedding_B": "LoRA on an embedding",
    "bias": "a bias tensor",
    "modules_to_save": "a full replacement weight (modules_to_save)",
    "token_adapter": "a trained token embedding (trainable_token_indices)",
    "base_layer": "a weight of the base model or of a parameter target",
}


def module_of(key: str) -> tuple[str, Literal["A", "B"]]:
    """The base model's module a tensor adapts, and which factor it is. Errors as `parse_key`."""
    return parse_key(key)[:2]


@dataclass(frozen=True)
class AdapterConfig:
    """What adapter_config.json says about the function an adapter computes."""

    base_model: str  # empty: not stated
    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        """The rank of `module`, a path as `module_of` gives it."""
        pattern = _first_match(self.rank_pattern, module)
        return self.r if pattern is None else self.rank_pattern[pattern]

    def scaling_of(self, module: str) -> float:
        """What B·A is multiplied by for `module`: alpha/r, or alpha/√r with use_rslora."""
        pattern = _first_match(self.alpha_pattern, module)
        alpha = self.lora_alpha if pattern is None else self.alpha_pattern[pattern]
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def unmatched_patterns(self, modules: Iterable[str]) -> list[str]:
        """Pattern keys that match none of `modules`, as "field[key]": PEFT serves those modules with the defaults."""
        paths = list(modules)
        return [
            f"{field}[{key!r}]"
            for field, patterns in (("rank_pattern", self.rank_pattern), ("alpha_pattern", self.alpha_pattern))
            for key in patterns
            if not any(_matches(key, path) for path in paths)
        ]


def parse_config(data: bytes) -> AdapterConfig:
    """Read adapter_config.json; INVALID_ARGUMENT with field "adapter_config.json/<key>" for what is wrong with it.

    A key that is unknown, or known and not implemented, loads with a neutral value (null, false, {}, [], "") and is
    refused by name with any other.
    """
    config = _load_object(data)
    if config.get("peft_type") != "LORA":
        raise _refuse("peft_type", f"must be 'LORA', not {quote(config.get('peft_type'))}")
    for key, value in config.items():
        if key not in _INERT and key not in _READ and not _neutral(value):
            raise _refuse(key, f"{quote(value)} is not supported: only plain LoRA on linear modules is served")
    if not _neutral(config.get("bias")) and config["bias"] != "none":
        raise _refuse("bias", f"{quote(config['bias'])} is not supported, only 'none'")
    init = config.get("init_lora_weights")
    if init is not None and str(init).lower() not in _PLAIN_INITS:
        raise _refuse(
            "init_lora_weights",
            f"{quote(init)} changes the base model's weights; save the adapter converted to plain LoRA "
            "(save_pretrained with path_initial_model_for_weight_conversion)",
        )
    _check_target_modules(config.get("target_modules"))
    base_model = config.get("base_model_name_or_path") or ""
    if not isinstance(base_model, str) or len(base_model) > _MAX_BASE_MODEL_CHARS:
        limit = f"must be null or a string of at most {_MAX_BASE_MODEL_CHARS} characters"
        raise _refuse("base_model_name_or_path", f"{limit}, not {quote(base_model)}")
    use_rslora = config.get("use_rslora")
    if not isinstance(use_rslora, bool) and not _neutral(use_rslora):
        raise _refuse("use_rslora", f"must be true or false, not {quote(use_rslora)}")
    return AdapterConfig(
        base_model=base_model,
        r=_rank("r", config.get("r")),
        lora_alpha=_alpha("lora_alpha", config.get("lora_alpha")),
        use_rslora=use_rslora is True,
        rank_pattern={k: _rank(f"rank_pattern[{k!r}]", v) for k, v in _patterns(config, "rank_pattern")},
        alpha_pattern={k: _alpha(f"alpha_pattern[{k!r}]", v) for k, v in _patterns(config, "alpha_pattern")},
    )


def _refuse(key: str, description: str) -> Exception:
    return invalid_argument(f"{CONFIG_FILE}/{quote(key)[1:-1]}", description)


def _load_object(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_CONFIG_BYTES:
        raise invalid_argument(CONFIG_FILE, f"{len(data)} bytes exceed the limit of {MAX_CONFIG_BYTES}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise _refuse(key, "appears twice; parsers disagree on which one holds")
            found[key] = value
        return found

    try:
        text = data.decode("utf-8-sig")
        config = json.loads(text, object_pairs_hook=unique)
        json.dumps(config, ensure_ascii=False).encode()  # lone surrogates cannot travel in a message
    except (ValueError, RecursionError) as error:
        raise invalid_argument(CONFIG_FILE, f"not JSON: {quote(str(error))[1:-1]}") from error
    if not isinstance(config, dict):
        raise invalid_argument(CONFIG_FILE, "must be a JSON object")
    return config


def _neutral(value: object) -> bool:
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def _rank(key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise _refuse(key, f"must be a positive integer, not {quote(value)}")
    return value


def _alpha(key: str, value: object) -> float:
    # The bound is far above any use and keeps every quotient finite in the precision of the weights.
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 2**31:
        raise _refuse(key, f"must be a positive finite number, not {quote(value)}")
    return float(value)


def _check_target_modules(targets: object) -> None:
    """Which modules are adapted is decided by the tensors; what the field holds must still make sense."""
    if isinstance(targets, str) and targets != "all-linear":
        _check_pattern("target_modules", targets)
    elif not _neutral(targets) and not isinstance(targets, str):
        names = targets if isinstance(targets, list) else [None]
        if not all(isinstance(name, str) for name in names):
            raise _refuse("target_modules", f"must be a string or a list of strings, not {quote(targets)}")


def _patterns(config: Mapping[str, Any], field: str) -> list[tuple[str, object]]:
    patterns = config.get(field)
    if _neutral(patterns):
        return []
    if not isinstance(patterns, dict) or len(patterns) > _MAX_PATTERNS:
        raise _refuse(field, f"must be an object of at most {_MAX_PATTERNS} entries")
    for pattern in patterns:
        _check_pattern(f"{field}[{pattern!r}]", pattern)
        # Python's matcher backtracks and cannot be interrupted, so a pattern must be unable to run away.
        quantifiers = re.findall(r"\\.|\[[^\]]*\]|(\(\?|[*+?{])", pattern)
        if sum(1 for q in quantifiers if q and q != "(?") > _MAX_PATTERN_QUANTIFIERS or re.search(r"\)[*+{]", pattern):
            raise _refuse(
                f"{field}[{pattern!r}]",
                f"more than {_MAX_PATTERN_QUANTIFIERS} quantifiers or a repeated group; list the modules instead",
            )
    return list(patterns.items())


def _check_pattern(key: str, pattern: str) -> None:
    try:
        if len(pattern) > _MAX_PATTERN_CHARS:
            raise ValueError(f"longer than {_MAX_PATTERN_CHARS} characters")
        re.compile(pattern)
        _compiled(pattern)
    except (ValueError, re.error, OverflowError, RecursionError) as error:
        raise _refuse(key, f"not a regular expression: {quote(str(error))[1:-1]}") from error


@functools.lru_cache(maxsize=_MAX_PATTERNS)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({pattern})$")


def _matches(pattern: str, module: str) -> bool:
    return _compiled(pattern).match(module) is not None


def _first_match(patterns: Mapping[str, object], module: str) -> str | None:
    """The first pattern, in the file's order, that matches the path whole or its end from a dot on: PEFT's rule."""
    return next((pattern for pattern in patterns if _matches(pattern, module)), None)
