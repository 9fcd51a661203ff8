"""A two-layer model and adapters for it, saved as users save them, with PEFT's answers for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model

VOCAB = 97
CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "tie_word_embeddings": True,
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# One for each module alone, and mixtures of ranks and modules.
ADAPTERS: dict[str, dict[str, Any]] = {
    "q4": {"r": 4, "target_modules": ["q_proj"]},
    "qv3": {"r": 3, "target_modules": ["q_proj", "v_proj"]},
    "all8": {"r": 8, "target_modules": ALL},
    "mlp12": {"r": 12, "target_modules": ["gate_proj", "up_proj", "down_proj"], "use_rslora": True},
}


class TinyModel:
    """`directory` holds the model, `adapters` the adapters' directories. `greedy` is PEFT's answer, alone, in fp32."""

    def __init__(self, directory: Path) -> None:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**CONFIG)
        model = transformers.LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
        self.directory = directory / "model"
        model.save_pretrained(self.directory)
        self._peft: Any = None
        for name, lora in ADAPTERS.items():
            lora_config = LoraConfig(task_type="CAUSAL_LM", lora_alpha=16, **lora)
            if self._peft is None:
                self._peft = get_peft_model(model, lora_config, adapter_name=name)
            else:
                self._peft.add_adapter(name, lora_config)
        with torch.no_grad():
            for key, parameter in self._peft.named_parameters():
                if "lora_B" in key:
                    parameter.normal_(0.0, 0.1)
        self._peft.save_pretrained(directory / "adapters")
        self.adapters = {name: directory / "adapters" / name for name in ADAPTERS}

    def add_adapter(self, name: str, directory: Path) -> None:
        """One more for PEFT to answer with."""
        self._peft.load_adapter(directory, adapter_name=name)

    @torch.inference_mode()
    def logits(self, adapter: str | None, ids: Sequence[int]) -> torch.Tensor:
        """[len(ids), V]."""
        tokens = torch.tensor([list(ids)])
        if adapter is None:
            with self._peft.disable_adapter():
                return self._peft(tokens).logits[0]
        self._peft.set_adapter(adapter)
        return self._peft(tokens).logits[0]

    def greedy(self, adapter: str | None, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        ids = list(prompt_ids)
        for _ in range(num_tokens):
            ids.append(int(self.logits(adapter, ids)[-1].argmax()))
        return ids[len(prompt_ids) :]
