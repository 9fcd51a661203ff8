"""adapter_config.json, tensor names and ids: read as PEFT reads them, or refused by name."""

from __future__ import annotations

import json
import math
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from protos.adapter_format import (
    check_adapter_id,
    check_revision,
    module_of,
    parse_config,
    parse_key,
    revision_digest,
)
from protos.errors import ServiceError

# What PEFT 0.21 writes for a plain adapter, less what the tests set.
PEFT_CONFIG: dict[str, Any] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "base_model_name_or_path": None, "bias": "none", "corda_config": None, "ensure_weight_tying": False,
    "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "kasa_config": None, "layer_replication": None, "layers_pattern": None,
    "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 32, "lora_bias": False, "lora_dropout": 0,
    "lora_ga_config": None, "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None,
    "monteclora_config": None, "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": 16,
    "rank_pattern": {}, "revision": None, "target_modules": ["v_proj", "q_proj"], "target_parameters": None,
    "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_bdlora": None, "use_dora": False,
    "use_qalora": False, "use_rslora": False, "velora_config": None,
}  # fmt: skip
Q_PROJ = "model.layers.0.self_attn.q_proj"


def read(**overrides: Any) -> Any:
    return parse_config(json.dumps(PEFT_CONFIG | overrides).encode())


def refusal(data: bytes) -> ServiceError:
    with pytest.raises(ServiceError) as raised:
        parse_config(data)
    assert raised.value.code.name == "INVALID_ARGUMENT"
    return raised.value


def test_a_plain_config_loads() -> None:
    config = read()
    assert (config.base_model, config.rank_of(Q_PROJ), config.scaling_of(Q_PROJ)) == ("", 16, 2.0)


def test_rank_stabilised_scaling_divides_by_the_root() -> None:  # CFG-01
    assert read(use_rslora=True).scaling_of(Q_PROJ) == 8.0


def test_patterns_apply_to_rank_and_scaling() -> None:
    config = read(rank_pattern={"q_proj": 4}, alpha_pattern={r"layers\.0\..*q_proj": 8}, use_rslora=True)
    assert config.rank_of(Q_PROJ) == 4
    assert config.scaling_of(Q_PROJ) == 8 / math.sqrt(4)
    assert config.rank_of("model.layers.0.self_attn.k_proj") == 16


PATTERNS = ["q_proj", "^q_proj", "^model.layers.0.self_attn.q_proj", r"layers\.[01]\..*", "proj", "self_attn.q_proj",
            r".*\.1\.self_attn\.(q|v)_proj", "lm_head", "^lm_head", "down_proj|gate_proj"]  # fmt: skip
MODULES = [f"model.layers.{i}.self_attn.{p}_proj" for i in range(3) for p in "qkv"] + ["lm_head", "x.mlp.down_proj"]


@given(st.lists(st.sampled_from(PATTERNS), unique=True), st.sampled_from(MODULES))
def test_patterns_pick_what_peft_picks(patterns: list[str], module: str) -> None:  # CFG-03
    ranks = {pattern: index + 1 for index, pattern in enumerate(patterns)}
    config = read(rank_pattern=ranks, alpha_pattern={p: 10 * r for p, r in ranks.items()})
    key = get_pattern_key(list(ranks), module)
    assert config.rank_of(module) == ranks.get(key, 16)
    assert config.scaling_of(module) == 10 * ranks[key] / ranks[key] if key in ranks else 32 / 16


def test_a_pattern_that_matches_nothing_is_reported() -> None:  # CFG-03
    config = read(alpha_pattern={"^q_proj": 100}, rank_pattern={"q_proj": 4})
    assert config.unmatched_patterns([Q_PROJ]) == ["alpha_pattern['^q_proj']"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "LOHA"),
        ("peft_type", None),
        ("r", 0), ("r", -1), ("r", 8.5), ("r", True), ("r", None), ("r", "8"), ("r", 10**400),
        ("lora_alpha", 0), ("lora_alpha", -2), ("lora_alpha", math.inf), ("lora_alpha", math.nan), ("lora_alpha", "x"),
        ("use_dora", True), ("use_rslora", "yes"), ("bias", "lora_only"), ("bias", "all"), ("lora_bias", True),
        ("fan_in_fan_out", True), ("modules_to_save", ["lm_head"]), ("trainable_token_indices", [1]),
        ("trainable_token_indices", {"embed_tokens": [3]}), ("layer_replication", [[0, 1]]),
        ("target_parameters", ["experts.gate_up_proj"]), ("alora_invocation_tokens", [1, 2]),
        ("arrow_config", {"top_k": 2}), ("use_qalora", True), ("megatron_config", {"tensor_model_parallel_size": 2}),
        ("use_bdlora", {"nblocks": 2}), ("use_bdlora", True), ("velora_config", {"num_groups": 2}),
        ("kasa_config", {"beta": 1}), ("monteclora_config", {"samples": 2}), ("ensure_weight_tying", True),
        ("loftq_config", {"loftq_bits": 4}), ("init_lora_weights", "pissa"), ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"), ("init_lora_weights", "corda"), ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"), ("init_lora_weights", ["gaussian"]), ("something_new", 1),
        ("something_new", 0), ("enable_lora", [True, False]), ("target_modules", "*"), ("target_modules", [1]),
        ("target_modules", 3), ("rank_pattern", ["q_proj"]), ("alpha_pattern", {"q_proj": 0}),
        ("base_model_name_or_path", 7), ("base_model_name_or_path", "x" * 2000),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(key: str, value: object) -> None:  # CFG-09, -13, -15, -17, KER-17
    field = refusal(json.dumps(PEFT_CONFIG | {key: value}).encode()).field
    assert field is not None
    assert field.startswith(f"adapter_config.json/{key}")


@pytest.mark.parametrize(
    "neutral",
    [
        {"something_new": None, "other_new": False, "third": {}, "fourth": [], "fifth": ""},
        {"layer_replication": [], "arrow_config": False, "use_bdlora": False, "megatron_config": {}},
        {"enable_lora": None, "merge_weights": False},
        {"init_lora_weights": "gaussian"}, {"init_lora_weights": False}, {"init_lora_weights": "eva"},
        {"init_lora_weights": "orthogonal"}, {"init_lora_weights": None},
        {"eva_config": {"rho": 2.0}}, {"corda_config": {"corda_method": "kpm"}}, {"exclude_modules": ["lm_head"]},
        {"layers_to_transform": [1], "layers_pattern": "layers", "target_modules": ["q_proj", "lm_head"]},
        {"target_modules": r".*\.(q|v)_proj"}, {"target_modules": "all-linear"}, {"target_modules": None},
        {"auto_mapping": {"unsloth_fixed": True}}, {"rank_pattern": None, "alpha_pattern": None},
    ],
)  # fmt: skip
def test_neutral_and_harmless_values_load(neutral: dict[str, Any]) -> None:  # CFG-05, -07, -09, SUR
    assert read(**neutral).r == 16


def test_a_base_model_not_stated_is_empty() -> None:  # CFG-11
    assert read(base_model_name_or_path=None).base_model == ""
    assert parse_config(b'{"peft_type": "LORA", "r": 1, "lora_alpha": 1}').base_model == ""
    assert read(base_model_name_or_path="/home/x/llama").base_model == "/home/x/llama"


@pytest.mark.parametrize("pattern", ["(", "(a+)+$", "(a|a)*b", "a?a?a?a?", ".*.*.*.*x", "x" * 600])
def test_a_pattern_that_could_run_away_or_does_not_compile_is_refused(pattern: str) -> None:  # CFG-05
    field = refusal(json.dumps(PEFT_CONFIG | {"rank_pattern": {pattern: 4}}).encode()).field
    assert field is not None
    assert field.startswith("adapter_config.json/rank_pattern[")


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"", "adapter_config.json"),
        (b"{", "adapter_config.json"),
        (b"[]", "adapter_config.json"),
        (b"\xff\xfe\x00", "adapter_config.json"),
        (b"[" * 200_000, "adapter_config.json"),
        (b'{"a": "\\ud800"}', "adapter_config.json"),
        (b" " * 300_000, "adapter_config.json"),
        (b'{"peft_type": "LORA", "r": 4, "r": 8, "lora_alpha": 8}', "adapter_config.json/r"),
        (b'{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "rank_pattern": {"q": 1, "q": 2}}', "adapter_config.json/q"),
    ],
)
def test_what_is_no_json_object_is_refused(data: bytes, field: str) -> None:
    assert refusal(data).field == field


@pytest.mark.parametrize(
    ("key", "module", "factor"),
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", Q_PROJ, "A"),
        ("model.layers.0.self_attn.q_proj.lora_B.weight", Q_PROJ, "B"),
        ("_orig_mod.base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", Q_PROJ, "A"),  # FIL-03
        ("base_model.model._orig_mod.model.layers.0.self_attn.q_proj.lora_A.weight", Q_PROJ, "A"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight", Q_PROJ, "A"),  # FIL-05
        ("base_model.model.lm_head.lora_A.weight", "lm_head", "A"),  # VOC-05
    ],
)
def test_known_wrappers_are_stripped_from_keys(key: str, module: str, factor: str) -> None:
    assert module_of(key) == (module, factor)


def test_a_key_gives_the_adapter_name_left_in_it() -> None:
    assert parse_key("m.lora_A.tuned.weight").adapter_name == "tuned"
    assert parse_key("m.lora_A.weight").adapter_name is None


@pytest.mark.parametrize(
    "key",
    ["", "lora_A.weight", "m.lora_A", "m..lora_A.weight", "m.lora_A..weight", "m.lora_A.a.b.weight", "m.lora_C.weight",
     "base_model.model.lm_head.weight", "m.lora_magnitude_vector", "m.lora_magnitude_vector.default.weight",
     "embed_tokens.lora_embedding_A", "q_proj.bias", "q_proj.lora_B.bias", "lm_head.modules_to_save.weight",
     "experts.base_layer.lora_A.weight", "embed_tokens.token_adapter.trainable_tokens_delta",
     "x" * 300 + ".lora_A.weight"],
)  # fmt: skip
def test_other_tensors_are_refused_by_name(key: str) -> None:  # CFG-13, CFG-17, VOC-01
    with pytest.raises(ServiceError) as raised:
        parse_key(key)
    assert raised.value.field is not None
    assert raised.value.field.startswith(f"adapter_model.safetensors/{key[:150]}")


@pytest.mark.parametrize("name", ["a", "org/x.v1", "base-model", "Base", "0", "a" * 128, "a_b-c.d/e"])
def test_ids_are_taken_verbatim(name: str) -> None:  # LIF-19
    assert check_adapter_id(name) == name


@pytest.mark.parametrize(
    "name",
    ["", "base", "a:b", "a\\b", "ü", "a" * 129, "a,b", "..", "a/../b", "a//b", "a/", "./a", "/a", " a", "a ", "a\n",
     'x"y', "-a", "a/./b"],
)  # fmt: skip
def test_other_ids_are_refused_by_the_rule(name: str) -> None:  # LIF-19
    with pytest.raises(ServiceError, match="1 to 128 characters"):
        check_adapter_id(name)


def test_the_revision_is_the_digest_of_the_sorted_manifest() -> None:
    manifest = f"{'0' * 64} adapter_config.json\n{'f' * 64} adapter_model.safetensors\n"
    files = [("adapter_model.safetensors", "f" * 64), ("adapter_config.json", "0" * 64)]
    revision = revision_digest(files)
    assert revision == f"sha256:{sha256(manifest.encode()).hexdigest()}" == check_revision(revision)
    for wrong in ("", "sha256:", revision.upper(), revision + "0", revision[7:]):
        with pytest.raises(ServiceError):
            check_revision(wrong)
