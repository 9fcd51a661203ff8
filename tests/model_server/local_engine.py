"""The real engine, scheduler and runner on a small model in this process: no gRPC, no second process, every step checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kernels.ops import Ops
from kernels.reference import sampling as reference_sampling
from model_server import messages
from model_server.adapter_bank import Load
from model_server.adapter_layout import load_adapter
from model_server.engine import Engine
from model_server.models.llama import LlamaModel
from model_server.request import AdapterRef, Sampling
from model_server.runner import Chunk, StepResult
from model_server.scheduler import Limits
from model_server.torch_runner import Memory, TorchRunner, bank_bytes_per_rank_row, kv_bytes_per_page
from model_server.weights import ModelFiles

FP32 = torch.float32


class LocalEngine:
    """`num_pages` and `rank_rows` size the memory exactly; adapters are read from `adapters` when first asked for."""

    def __init__(
        self,
        files: ModelFiles,
        ops: Ops,
        adapters: Mapping[str, Path],
        *,
        num_pages: int = 64,
        rank_rows: int = 64,
        max_adapters: int = 8,
        prefix_cache: bool = True,
        graph_batch: int = 0,
        sampling_ops: Any = reference_sampling,
        **limits: Any,
    ) -> None:
        self._files = files
        self._adapters = adapters
        memory = Memory(
            kv_bytes=num_pages * kv_bytes_per_page(files.config, FP32),
            adapter_bytes=rank_rows * bank_bytes_per_rank_row(files.config, FP32),
            max_adapters=max_adapters,
            max_rank=rank_rows,
        )
        cpu = torch.device("cpu")
        model = LlamaModel(files.config, files.tensors(), ops, FP32, cpu)
        self.runner = TorchRunner(
            files.config, model, ops, sampling_ops, dtype=FP32, device=cpu, memory=memory, graph_batch=graph_batch
        )
        info = self.runner.info
        self._now_s = 0.0
        self.engine = Engine(
            self.runner,
            self,
            Limits(page_size=info.page_size, **limits),
            host_bytes_limit=2**30,
            clock=self._clock,
            emit=self._event,
            prefix_cache=prefix_cache,
            check_every_step=True,
        )
        self.num_ahead = 0
        run = self.runner.run

        def counted(chunks: Sequence[Chunk], ahead: Load | None = None) -> StepResult:
            self.num_ahead += ahead is not None
            return run(chunks, ahead)

        self.runner.run = counted
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.prompt_scores: dict[int, list[Any]] = {}
        self.cached: dict[int, int] = {}
        self.ended: dict[int, messages.Ended] = {}

    def _clock(self) -> float:
        self._now_s += 0.001
        return self._now_s

    def submit(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        adapter: str | None = None,
        *,
        revision: str | None = None,
        priority: int = 1,
        **sampling: Any,
    ) -> int:
        """Greedy unless `sampling` says otherwise. `revision`: by default the only one that `adapter` has."""
        key = len(self.tokens)
        self.tokens[key], self.logprobs[key], self.prompt_scores[key] = [], [], []
        ref = AdapterRef(adapter, revision or f"sha256:{adapter}") if adapter else None
        params = Sampling(max_tokens=max_tokens, **{"ignore_eos": True} | sampling)
        self.engine.handle(
            messages.Submit(key, str(key), list(prompt_ids), params, ref, priority, "t", self._clock(), None)
        )
        return key

    def run(self) -> None:
        while self.engine.has_work or self.engine.scheduler.parked:
            self.engine.step()
        pool = self.engine.scheduler.pool
        assert pool.num_free == pool.num_pages
        assert len(self.ended) == len(self.tokens)

    # The engine's other sides

    def start(self, ref: AdapterRef, path: str) -> None:
        adapter = load_adapter(Path(path), self._files.config, FP32, self.runner.info.max_rank)
        self.engine.adapter_loaded(ref, adapter)

    def _event(self, event: Any) -> None:
        match event:
            case messages.AdapterWanted(ref, _):
                self.engine.handle(messages.AdapterFetched(ref, str(self._adapters[ref.adapter_id])))
            case messages.Started(key, num_cached):
                self.cached[key] = num_cached
            case messages.PromptScored(key, scored):
                self.prompt_scores[key] += scored
            case messages.Tokens(key, index, sampled):
                assert index == len(self.tokens[key]), "each token is told once"
                self.tokens[key] += [s.token_id for s in sampled]
                self.logprobs[key] += sampled
            case messages.Ended(key):
                self.ended[key] = event
