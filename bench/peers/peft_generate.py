"""transformers + PEFT: static batches, each row with the adapter that `adapter_names` gives it."""

from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

_BASE = "__base__"  # PEFT's word for a row without adapter
_BATCH = 32


class Backend:
    def __init__(self, setup: dict[str, Any]) -> None:
        model = AutoModelForCausalLM.from_pretrained(setup["model"], dtype=getattr(torch, setup["dtype"]))
        for name, path in setup["adapters"].items():
            if isinstance(model, PeftModel):
                model.load_adapter(path, name)
            else:
                model = PeftModel.from_pretrained(model, path, adapter_name=name)
        self._model = model.eval()
        self._waiting: deque[tuple[int, dict[str, Any]]] = deque()
        self.facts = {"version": version("peft"), "dtype": setup["dtype"]}

    def add(self, index: int, request: dict[str, Any]) -> None:
        self._waiting.append((index, request))

    @torch.inference_mode()
    def step(self, emit: Callable[[int, int], None]) -> None:
        """A whole batch, to the end of its longest request."""
        batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
        width = max(len(request["prompt_ids"]) for _, request in batch)
        length = max(request["output_tokens"] for _, request in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (_, request) in enumerate(batch):
            prompt = torch.tensor(request["prompt_ids"])
            ids[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        options: dict[str, Any] = {}
        if isinstance(self._model, PeftModel):
            options["adapter_names"] = [request["adapter"] or _BASE for _, request in batch]
        self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=length,
            max_new_tokens=length,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([_Watch(batch, width, emit)]),
            **options,
        )


class _Watch(StoppingCriteria):  # type: ignore[misc]
    """Called after every token of the batch; stops nothing."""

    def __init__(self, batch: list[tuple[int, dict[str, Any]]], width: int, emit: Callable[[int, int], None]) -> None:
        self._batch = batch
        self._width = width
        self._emit = emit

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        num_generated = input_ids.shape[1] - self._width
        for index, request in self._batch:
            if num_generated <= request["output_tokens"]:
                self._emit(index, 1)
        return torch.zeros(len(self._batch), dtype=torch.bool)
