"""The forward pass against transformers and PEFT in fp32: every family, chunked over pages, mixed adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from kernels.cpu.ops import CpuOps
from kernels.ops import Ops
from kernels.reference.ops import ReferenceOps
from model_server.adapter_layout import load_adapter
from model_server.models.llama import LlamaModel
from model_server.weights.huggingface import HuggingFaceDirectory
from tests.model_server.paged_run import PagedRun, fill_bank

VOCAB = 97
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama-tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-bias": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True),
    "llama3-rope": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "linear-rope": lambda: transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=19, head_dim=24),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "gelu": lambda: transformers.LlamaConfig(**SIZES, hidden_act="gelu_pytorch_tanh"),
}
CONFIG_CLASSES = {
    "mistral": transformers.MistralForCausalLM,
    "qwen2": transformers.Qwen2ForCausalLM,
    "qwen3": transformers.Qwen3ForCausalLM,
    "llama": transformers.LlamaForCausalLM,
}


def make_model(config: Any) -> Any:
    torch.manual_seed(0)
    model = CONFIG_CLASSES[config.model_type](config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Strong enough that every part shows in the logits; norms and biases too, which are made as ones and zeros.
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    return model


def prompts(*lengths: int) -> dict[int, list[int]]:
    generator = torch.Generator().manual_seed(1)
    return {i: torch.randint(0, VOCAB, (n,), generator=generator).tolist() for i, n in enumerate(lengths)}


def expected(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def load(path: Path, ops: Ops) -> tuple[LlamaModel, HuggingFaceDirectory]:
    files = HuggingFaceDirectory(path)
    return LlamaModel(files.config, files.tensors(), ops, torch.float32, torch.device("cpu")), files


@pytest.mark.parametrize("ops", [ReferenceOps(), CpuOps()], ids=["reference", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, ops: Ops, tmp_path: Path) -> None:
    model = make_model(FAMILIES[family]())
    model.save_pretrained(tmp_path, max_shard_size="100KB" if family in ("qwen2", "llama-tied") else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (family in ("qwen2", "llama-tied"))
    ours, files = load(tmp_path, ops)
    requests = prompts(60, 16, 33, 47, 3)
    logits = PagedRun(ours, files.config, ops).run(requests)
    for request, tokens in requests.items():
        torch.testing.assert_close(logits[request], expected(model, tokens), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("ops", [ReferenceOps(), CpuOps()], ids=["reference", "cpu"])
@pytest.mark.parametrize("scattered", [False, True])
def test_adapters_mixed_in_one_batch_equal_peft_alone(ops: Ops, scattered: bool, tmp_path: Path) -> None:
    config = FAMILIES["qwen2"]()
    make_model(config).save_pretrained(tmp_path / "base")
    everything = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    shapes: list[dict[str, Any]] = [
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        {"r": 12, "lora_alpha": 7, "target_modules": everything},
        {"r": 3, "lora_alpha": 16, "target_modules": ["down_proj"], "use_rslora": True},
        {"r": 6, "target_modules": everything, "rank_pattern": {"k_proj": 9, "up_proj": 1}},
    ]
    for index, shape in enumerate(shapes):
        peft_model = get_peft_model(make_model(config), LoraConfig(**shape))
        torch.manual_seed(index)
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, 0.1)
        peft_model.save_pretrained(tmp_path / str(index))

    requests = prompts(20, 41, 17, 33, 26, 20)
    adapters = {0: 0, 1: 1, 2: 2, 3: 3, 4: 1}  # request 5 is the base model's
    ours, files = load(tmp_path / "base", ops)
    loaded = [load_adapter(tmp_path / str(i), files.config, torch.float32, 64).weights for i in range(len(shapes))]
    lora = fill_bank(files.config, loaded, scattered)
    mixed = PagedRun(ours, files.config, ops).run(requests, adapters, lora)
    for request, tokens in requests.items():
        model = make_model(config)
        if request in adapters:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(tmp_path / str(adapters[request]))).eval()
        reference = expected(model, tokens)
        torch.testing.assert_close(mixed[request], reference, atol=1e-4, rtol=1e-5)
        if request in adapters:
            assert (reference - expected(make_model(config), tokens)).abs().max() > 0.1
    # The base request is not touched by its neighbours' adapters: the same batches without any give the same bits.
    plain = PagedRun(ours, files.config, ops).run(requests)
    assert torch.equal(mixed[5], plain[5])


def test_progress_counts_every_tensor(tmp_path: Path) -> None:
    make_model(FAMILIES["qwen3"]()).save_pretrained(tmp_path)
    files = HuggingFaceDirectory(tmp_path)
    calls: list[tuple[int, int]] = []
    LlamaModel(
        files.config, files.tensors(), ReferenceOps(), torch.float32, torch.device("cpu"), lambda *c: calls.append(c)
    )
    assert calls == [(i + 1, files.num_tensors) for i in range(files.num_tensors)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lack 1 tensors, the first is 'model.layers.1.mlp.up"),
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight"),
        (lambda t: t.update({"model.layers.9.x.weight": torch.zeros(1)}), r"'model\.layers\.9\.x\.weight' is not one"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(3, 64)}), r"'lm_head\.weight' has shape \(3, 64\)"),
    ],
)
def test_wrong_tensors_are_named(change: Any, message: str, tmp_path: Path) -> None:
    make_model(FAMILIES["llama"]()).save_pretrained(tmp_path)
    files = HuggingFaceDirectory(tmp_path)
    tensors = dict(files.tensors())
    change(tensors)
    with pytest.raises(ValueError, match=message):
        LlamaModel(files.config, tensors.items(), ReferenceOps(), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.mlp.up_proj.weight",
    ],
)
def test_a_tensor_that_comes_twice_is_named(name: str, tmp_path: Path) -> None:
    make_model(FAMILIES["llama"]()).save_pretrained(tmp_path)
    files = HuggingFaceDirectory(tmp_path)
    tensors = dict(files.tensors())
    twice = [*tensors.items(), (name, tensors[name])]
    with pytest.raises(ValueError, match=f"'{name}' is there twice"):
        LlamaModel(files.config, twice, ReferenceOps(), torch.float32, torch.device("cpu"))


def test_old_style_rope_fields_mean_the_same(tmp_path: Path) -> None:
    model = make_model(FAMILIES["llama3-rope"]())
    model.save_pretrained(tmp_path)
    new = HuggingFaceDirectory(tmp_path).config
    raw = json.loads((tmp_path / "config.json").read_text())
    scaling = raw.pop("rope_parameters")
    raw["rope_theta"] = scaling.pop("rope_theta")
    raw["rope_scaling"] = scaling
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert HuggingFaceDirectory(tmp_path).config == new
