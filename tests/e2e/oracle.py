"""The oracle: transformers + PEFT in fp32, one request at a time, on the same base model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

# Of the three adapters with random weights: rank, modules, and what else their config exercises.
RANDOM_ADAPTERS: dict[str, dict[str, Any]] = {
    "random-4": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "random-12": {
        "r": 12,
        "lora_alpha": 12,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "rank_pattern": {"k_proj": 5},
        "alpha_pattern": {"down_proj": 6},
    },
    "random-64": {"r": 64, "lora_alpha": 16, "use_rslora": True, "target_modules": ["o_proj", "up_proj", "down_proj"]},
}


class Oracle:
    """`adapters`: adapter id to the directory PEFT saved; the given ones and the RANDOM_ADAPTERS, saved into `directory`."""

    def __init__(self, gguf: Path, adapters: Mapping[str, Path], directory: Path) -> None:
        transformers.utils.logging.disable_progress_bar()
        self._tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        base = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
        configs = {name: LoraConfig(task_type="CAUSAL_LM", **config) for name, config in RANDOM_ADAPTERS.items()}
        first = next(iter(configs))
        torch.manual_seed(0)  # the same adapters in each run: by chance one changed 3 of 20 answers only
        self._model = get_peft_model(base, configs[first], adapter_name=first)
        for name, config in configs.items():
            if name != first:
                self._model.add_adapter(name, config)
        # PEFT starts with B = 0. Both factors random, and strong enough to change what is said.
        for key, parameter in self._model.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter, std=0.05)
        self._model.save_pretrained(directory)
        self.adapters = dict(adapters) | {name: directory / name for name in configs}
        for name, path in adapters.items():
            self._model.load_adapter(path, adapter_name=name)
        self._model.eval()
        self._selected: str | None = next(reversed(self.adapters))
        self._model.set_adapter(self._selected)

    def chat_ids(self, prompt: str) -> list[int]:
        """The token ids of `prompt` as a user's message, up to where the assistant's turn begins."""
        return list(
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
            )
        )

    @torch.inference_mode()
    def logits(self, adapter: str | None, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Tensor:
        """[len(output_ids), V] fp32: what each output token was chosen from, had this request run alone.

        One pass over prompt and output; `output_ids` is the greedy output exactly if each is its row's argmax.
        """
        self._select(adapter)
        ids = torch.tensor([[*prompt_ids, *output_ids[:-1]]])
        logits: Tensor = self._model(ids, use_cache=False).logits
        return logits[0, len(prompt_ids) - 1 :].float()

    @torch.inference_mode()
    def generate(self, adapter: str | None, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy output by transformers' own generation loop."""
        self._select(adapter)
        output = self._model.generate(
            inputs=torch.tensor([prompt_ids]),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return [int(token) for token in output[0, len(prompt_ids) :]]

    def _select(self, adapter: str | None) -> None:
        """PEFT walks over all modules to switch adapters, which takes longer than the pass: ask in their order."""
        if adapter == self._selected:
            return
        if adapter is None:
            self._model.base_model.disable_adapter_layers()
        else:
            self._model.base_model.enable_adapter_layers()
            self._model.set_adapter(adapter)
        self._selected = adapter
