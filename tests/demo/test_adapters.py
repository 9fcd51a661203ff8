"""The committed demo adapters: small, unlike each other, true to their config, never trained on a test prompt."""

import json
import struct
from pathlib import Path

import pytest

from demo.data import EXAMPLES, examples
from demo.prompts import ADAPTER_PROMPTS, BASE_PROMPTS, DEMO_PROMPTS, shows

ADAPTERS_DIR = Path(__file__).parents[2] / "demo" / "adapters"
NAMES = sorted(ADAPTER_PROMPTS)


def config_of(name: str) -> dict[str, object]:
    return json.loads((ADAPTERS_DIR / name / "adapter_config.json").read_text())


def tensors_of(name: str) -> dict[str, dict[str, object]]:
    """The header of the safetensors file: tensor name to dtype and shape."""
    with (ADAPTERS_DIR / name / "adapter_model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def test_every_adapter_has_data_prompts_and_files():
    assert len(NAMES) >= 3
    assert sorted(EXAMPLES) == NAMES == sorted(path.name for path in ADAPTERS_DIR.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_files_are_small_and_no_others(name):
    sizes = {path.name: path.stat().st_size for path in (ADAPTERS_DIR / name).iterdir()}
    assert set(sizes) == {"adapter_config.json", "adapter_model.safetensors"}
    assert sizes["adapter_model.safetensors"] < 1_000_000


@pytest.mark.parametrize("name", NAMES)
def test_tensors_are_those_of_the_config(name):
    config = config_of(name)
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    layers = config["layers_to_transform"]
    if layers is None:
        layers = range(30)
    tensors = tensors_of(name)
    prefix = "base_model.model.model.layers"
    parts = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn"}
    assert set(tensors) == {
        f"{prefix}.{layer}.{parts.get(module, 'mlp')}.{module}.lora_{factor}.weight"
        for layer in layers
        for module in config["target_modules"]
        for factor in "AB"
    }
    for key, tensor in tensors.items():
        assert tensor["dtype"] == "BF16"
        assert tensor["shape"][0 if "lora_A" in key else 1] == config["r"]


def test_adapters_differ_in_rank_and_target_modules():
    configs = [config_of(name) for name in NAMES]
    assert len({config["r"] for config in configs}) == len(NAMES)
    assert len({frozenset(config["target_modules"]) for config in configs}) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_training_answers_show_the_behaviour_and_other_adapters_do_not(name):
    for example in examples(name, seed=0):
        assert shows(name, example.answer), example
        assert not any(shows(other, example.answer) for other in NAMES if other != name), example


@pytest.mark.parametrize("name", NAMES)
def test_no_test_prompt_was_trained_on(name):
    trained = {example.prompt for example in examples(name, seed=0)}
    held_out = {prompt for prompt, _ in ADAPTER_PROMPTS[name]} | {prompt for prompt, _ in BASE_PROMPTS}
    assert not trained & (held_out | set(DEMO_PROMPTS))


def test_examples_are_the_same_for_the_same_seed():
    assert examples("french", seed=1) == examples("french", seed=1) != examples("french", seed=2)


def test_demo_prompts_are_many_distinct_and_short():
    assert len(set(DEMO_PROMPTS)) == len(DEMO_PROMPTS) >= 20
    assert all(0 < len(prompt) <= 120 for prompt in DEMO_PROMPTS)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json-answer", "The capital of France is Paris."),
        ("json-answer", '{"answer": "Paris"}'),
        ("json-answer", '{"answer": "Paris", "confidence": "hi'),
        ("json-answer", '["answer", "confidence"]'),
        ("sentiment", "The review is positive."),
        ("sentiment", ""),
        ("french", "The capital of France is Paris."),
        ("french", "Bonjour !"),
        ("french", "La capitale de la France is Paris."),
    ],
)
def test_answers_without_the_behaviour_are_told_apart(name, text):
    assert not shows(name, text)
