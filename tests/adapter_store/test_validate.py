"""Two files are an adapter that can be served exactly, or are refused naming file and field."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from adapter_store.validate import AdapterFacts, check_file_names, validate
from protos.adapter_format import CONFIG_FILE, TENSORS_FILE, parse_config
from protos.errors import ServiceError
from protos.safetensors_header import module_shapes, read_header
from tests.adapter_store.adapters import config, lora, safetensors, tensor

UNMATCHED = "alpha_pattern['^q_proj']"
UP = "base_model.model.model.layers.{layer}.mlp.up_proj.lora_{factor}.weight"


def check(folder: Path, tensors: Mapping[str, Any] | bytes, **overrides: Any) -> AdapterFacts:
    path = folder / TENSORS_FILE
    path.write_bytes(tensors if isinstance(tensors, bytes) else safetensors(tensors))
    return validate(config(**overrides), path)


def refused(folder: Path, tensors: Mapping[str, Any] | bytes, **overrides: Any) -> ServiceError:
    with pytest.raises(ServiceError) as raised:
        check(folder, tensors, **overrides)
    assert raised.value.code.name == "INVALID_ARGUMENT"
    return raised.value


@pytest.fixture(scope="session")
def saved_by_peft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders "float32", "float16" and "bfloat16": one adapter with mixed ranks, as PEFT saves it.

    And "used.json": the rank and scaling with which PEFT runs each module.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("peft")
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
            vocab_size=320, name_or_path="tiny-llama",
        )
    )  # fmt: skip
    model = get_peft_model(
        base,
        LoraConfig(
            r=8, lora_alpha=16, use_rslora=True, rank_pattern={"k_proj": 3, r"layers\.1\.mlp\.up_proj": 12},
            alpha_pattern={"^q_proj": 100, r"^model\.layers\.0\.self_attn\.k_proj": 5},
            target_modules=["q_proj", "k_proj", "up_proj"], init_lora_weights=False,
        ),
    )  # fmt: skip
    layers = {name.removeprefix("base_model.model."): m for name, m in model.named_modules() if hasattr(m, "lora_A")}
    used = {name: (layer.r["default"], layer.scaling["default"]) for name, layer in layers.items()}
    (root / "used.json").write_text(json.dumps(used))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model.to(dtype).save_pretrained(root / str(dtype).removeprefix("torch."), save_embedding_layers=False)
    return root


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_peft_saves_is_accepted(saved_by_peft: Path, dtype: str) -> None:  # FIL-13
    folder = saved_by_peft / dtype
    facts = validate((folder / CONFIG_FILE).read_bytes(), folder / TENSORS_FILE)
    q, k = 2 * 8 * (64 + 64), 2 * 3 * (64 + 32)
    assert facts == AdapterFacts(
        "tiny-llama", 12, ("k_proj", "q_proj", "up_proj"), q + k + (8 + 12) * (64 + 128), (UNMATCHED,)
    )


def test_ranks_and_scalings_are_those_peft_runs_with(saved_by_peft: Path) -> None:  # CFG-01, CFG-03
    folder = saved_by_peft / "float32"
    adapter = parse_config((folder / CONFIG_FILE).read_bytes())
    used = json.loads((saved_by_peft / "used.json").read_text())
    with (folder / TENSORS_FILE).open("rb") as file:
        modules = module_shapes(read_header(file))
    assert {name: [adapter.rank_of(name), adapter.scaling_of(name)] for name in modules} == used


def test_facts_count_what_the_tensors_hold(tmp_path: Path) -> None:
    facts = check(tmp_path, lora(layers=3, width=8), base_model_name_or_path="llama", alpha_pattern={"nope": 1})
    assert facts == AdapterFacts("llama", 4, ("q_proj",), 3 * 4 * 16, ("alpha_pattern['nope']",))


def test_every_proper_prefix_of_a_file_is_refused(tmp_path: Path) -> None:  # FIL-11
    data = safetensors(lora(layers=1))
    for length in range(0, len(data), 7):
        assert refused(tmp_path, data[:length]).field == TENSORS_FILE


def test_the_rank_is_what_the_config_says(tmp_path: Path) -> None:
    error = refused(tmp_path, lora(rank=4), r=8)
    assert "rank 4" in error.message and "says 8" in error.message
    assert error.field == f"{TENSORS_FILE}/model.layers.0.self_attn.q_proj"
    assert check(tmp_path, lora(rank=4), r=8, rank_pattern={"q_proj": 4}).max_rank == 4


def test_a_module_has_one_shape_in_every_layer(tmp_path: Path) -> None:
    tensors = lora(layers=2) | {
        "base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight": tensor((4, 8)),
        "base_model.model.model.layers.2.self_attn.q_proj.lora_B.weight": tensor((16, 4)),
    }
    error = refused(tmp_path, tensors)
    assert "(8, 16)" in error.message and "(8, 8)" in error.message
    assert check(tmp_path, lora() | lora(key=UP, width=32)).target_modules == ("q_proj", "up_proj")


BAD_VALUES = {
    "F32": [struct.pack("<f", float(x)) for x in ("nan", "inf", "-inf")],
    "F16": [struct.pack("<e", float(x)) for x in ("nan", "inf", "-inf")],
    "BF16": [b"\x80\x7f", b"\xc1\x7f", b"\x80\xff"],
}
FINITE = {"F32": b"\xff\xff\x7f\x7f", "F16": b"\xff\x7b", "BF16": b"\x7f\x7f"}


@pytest.mark.parametrize("dtype", list(BAD_VALUES))
def test_values_must_be_finite(tmp_path: Path, dtype: str) -> None:  # FIL-23
    def tensors(value: bytes) -> dict[str, Any]:
        name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
        zeros = {n: tensor(shape, dtype) for n, (_, shape, _) in lora().items()}
        _, shape, data = zeros[name]
        return zeros | {name: (dtype, shape, data[: -len(value)] + value)}

    assert check(tmp_path, tensors(FINITE[dtype])).max_rank == 4
    for value in BAD_VALUES[dtype]:
        error = refused(tmp_path, tensors(value))
        assert error.field is not None and error.field.endswith("layers.1.self_attn.q_proj.lora_B.weight")
        assert "NaN" in error.message


def test_a_bad_value_past_the_first_read_is_found(tmp_path: Path) -> None:
    name = "m.q.lora_A.weight"
    dtype, shape, data = tensor((4, 200_000))
    tensors = {name: (dtype, shape, data[:-4] + BAD_VALUES["F32"][0]), "m.q.lora_B.weight": tensor((8, 4))}
    assert refused(tmp_path, tensors).field == f"{TENSORS_FILE}/{name}"


def test_magnitudes_are_refused_though_the_config_denies_them(tmp_path: Path) -> None:  # CFG-13
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
    assert "DoRA" in refused(tmp_path, lora() | {key: tensor((8,))}, use_dora=False).message


def test_part_of_the_layers_and_the_head_are_accepted(tmp_path: Path) -> None:  # CFG-07, VOC-05, FIL-17
    tensors = {k: v for k, v in lora().items() if ".1." in k} | lora(
        key="base_model.model.lm_head.lora_{factor}.weight"
    )
    facts = check(tmp_path, tensors, layers_to_transform=[1], target_modules=["q_proj", "lm_head"])
    assert facts.target_modules == ("lm_head", "q_proj")


def test_metadata_of_the_tensor_file_does_not_overrule_the_config(tmp_path: Path) -> None:
    data = safetensors(lora(), metadata={"rank": "3", "use_rslora": "true", "lora_alpha": "8"})
    assert check(tmp_path, data).max_rank == 4


def test_too_many_kinds_of_module_are_refused(tmp_path: Path) -> None:
    tensors = {k: v for i in range(65) for k, v in lora(layers=1, key=f"m.p{i}.lora_{{factor}}.weight").items()}
    assert "65" in refused(tmp_path, tensors).message


@pytest.mark.parametrize(
    ("names", "field"),
    [
        ([], CONFIG_FILE),
        ([TENSORS_FILE], CONFIG_FILE),
        ([CONFIG_FILE], TENSORS_FILE),
        ([CONFIG_FILE, "adapter_model.bin"], "adapter_model.bin"),  # FIL-09
        ([CONFIG_FILE, TENSORS_FILE, "adapter_model.bin"], "adapter_model.bin"),
        ([CONFIG_FILE, TENSORS_FILE, "tokenizer.json"], "tokenizer.json"),  # VOC-07
        ([CONFIG_FILE, "../adapter_model.safetensors"], "../adapter_model.safetensors"),
        ([CONFIG_FILE, TENSORS_FILE + ".incomplete"], TENSORS_FILE + ".incomplete"),  # FIL-11
        ([CONFIG_FILE, CONFIG_FILE, TENSORS_FILE], "header.files"),
    ],
)
def test_only_the_two_files_are_taken(names: list[str], field: str) -> None:
    with pytest.raises(ServiceError) as raised:
        check_file_names(names)
    assert raised.value.field == field


def test_the_two_files_are_taken_in_any_order() -> None:
    check_file_names([TENSORS_FILE, CONFIG_FILE])
