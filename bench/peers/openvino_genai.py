"""OpenVINO GenAI's continuous batching. Base model only: it would give the whole batch the first request's adapter."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import openvino
import openvino_genai

_PRECISIONS = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}


class Backend:
    def __init__(self, setup: dict[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2  # GB
        scheduler.max_num_seqs = setup["max_running"]
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            setup["model"], scheduler, "CPU", {"INFERENCE_PRECISION_HINT": _PRECISIONS[setup["dtype"]]}
        )
        self._handles: dict[int, Any] = {}
        self.facts = {"version": version("openvino-genai"), "dtype": setup["dtype"]}

    def add(self, index: int, request: dict[str, Any]) -> None:
        sampling = openvino_genai.GenerationConfig()
        sampling.max_new_tokens = request["output_tokens"]
        sampling.ignore_eos = True
        sampling.do_sample = False
        prompt = openvino.Tensor(np.array([request["prompt_ids"]], dtype=np.int64))
        self._handles[index] = self._pipeline.add_request(index, prompt, sampling)

    def step(self, emit: Callable[[int, int], None]) -> None:
        self._pipeline.step()
        for index, handle in list(self._handles.items()):
            while handle.can_read():
                emit(index, sum(len(output.generated_ids) for output in handle.read().values()))
            if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                del self._handles[index]
