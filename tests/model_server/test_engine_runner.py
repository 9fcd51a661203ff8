"""Engine and runner together on every backend: mixed adapters, chunked prefill, preemption, prefix reuse, padded graph
buckets. Every request's tokens are those PEFT gives it alone."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import psutil
import pytest
import torch

from kernels.cpu.ops import CpuOps
from kernels.ops import Ops
from kernels.reference.ops import ReferenceOps
from kernels.triton_ops import TritonOps
from model_server.weights.huggingface import HuggingFaceDirectory
from tests.model_server.local_engine import LocalEngine
from tests.model_server.tiny import ADAPTERS, VOCAB, TinyModel

MAX_TOKENS = 64
BACKENDS: dict[str, Callable[[], Ops]] = {
    "reference": ReferenceOps,
    "cpu": CpuOps,
    "triton": lambda: TritonOps(MAX_TOKENS, "cpu"),
}
TARGETS = (None, *ADAPTERS)


def prompt(random: Random, length: int) -> list[int]:
    return [random.randrange(VOCAB) for _ in range(length)]


def engine(files: HuggingFaceDirectory, tiny: TinyModel, backend: str = "cpu", **options: object) -> LocalEngine:
    limits = {"max_batch_tokens": MAX_TOKENS, "max_running": 8, "max_prefill_tokens": 32} | options
    return LocalEngine(files, BACKENDS[backend](), tiny.adapters, **limits)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_chunked_preempted_equals_alone(tiny: TinyModel, files: HuggingFaceDirectory, backend: str) -> None:
    """KER-13: four adapters and the base in one batch."""
    # Few pages for requests that come to need three or four each; chunks of five; a bank too small for all adapters.
    interpreted = backend == "triton"
    targets = (None, "qv3", "all8") if interpreted else TARGETS
    local = engine(
        files,
        tiny,
        backend,
        num_pages=4 if interpreted else 6,
        max_prefill_tokens=5,
        rank_rows=11 if interpreted else 20,
        graph_batch=4 if interpreted else 0,
    )
    num_tokens = 6 if interpreted else 24
    random = Random(0)
    asked = [(target, prompt(random, length)) for target, length in zip(targets, (30, 15, 9, 16, 15), strict=False)]
    keys = [local.submit(ids, num_tokens, target) for target, ids in asked]
    local.run()
    for key, (target, ids) in zip(keys, asked, strict=True):
        assert local.tokens[key] == tiny.greedy(target, ids, num_tokens), target
    assert local.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("context_length", [32, 47, 48])
def test_the_cost_of_rows_is_measured_within_the_context(tiny: TinyModel, tmp_path: Path, context_length: int) -> None:
    """Longer prompts than the model takes would read past its table of angles."""
    copy = shutil.copytree(tiny.directory, tmp_path / "model")
    config = json.loads((copy / "config.json").read_text()) | {"max_position_embeddings": context_length}
    (copy / "config.json").write_text(json.dumps(config))
    local = engine(HuggingFaceDirectory(copy), tiny)
    assert (local.runner.info.fixed_rows is None) == (context_length < 48)
    asked = prompt(Random(0), 20)
    key = local.submit(asked, 8)
    local.run()
    assert local.tokens[key] == tiny.greedy(None, asked, 8)


def test_layers_share_their_tables(tiny: TinyModel, files: HuggingFaceDirectory) -> None:
    """As backends that note something per tables take them to do."""
    first, second = engine(files, tiny).runner._lora
    assert first.qkv is not None and second.qkv is not None and first.qkv.tables is second.qkv.tables


@pytest.mark.parametrize("chunk", [1, 2, 15, 16, 17, 32])
def test_every_chunk_size(tiny: TinyModel, files: HuggingFaceDirectory, chunk: int) -> None:
    """KER-13: and all four are resident together here."""
    local = engine(files, tiny, max_prefill_tokens=chunk)
    random = Random(chunk)
    asked = [(target, prompt(random, random.randrange(1, 40))) for target in TARGETS]
    keys = [local.submit(ids, 6, target) for target, ids in asked]
    local.run()
    assert [local.tokens[key] for key in keys] == [tiny.greedy(target, ids, 6) for target, ids in asked]


def test_preemption_at_every_step(tiny: TinyModel, files: HuggingFaceDirectory) -> None:
    """SCH-01: the sampled but not yet fed token is replayed once; penalties and seeds come out the same."""
    first, second = prompt(Random(3), 20), prompt(Random(4), 18)
    options = {"temperature": 0.9, "seed": 5, "frequency_penalty": 0.7, "repetition_penalty": 1.2}
    quiet = engine(files, tiny)
    keys = [quiet.submit(first, 16, "qv3", **options), quiet.submit(second, 16, "all8", **options)]
    quiet.run()
    for step in range(1, 16):
        local = engine(files, tiny, prefix_cache=step % 2 == 0)
        again = [local.submit(first, 16, "qv3", **options), local.submit(second, 16, "all8", **options)]
        for _ in range(step):
            local.engine.step()
        scheduler = local.engine.scheduler
        plan = scheduler.schedule(0.0)  # its chunks are not run: what counts is that the request loses its pages
        if plan.chunks:
            scheduler._preempt(plan.chunks[-1].request, plan)
        local.run()
        assert [local.tokens[k] for k in again] == [quiet.tokens[k] for k in keys], step


def test_prefix_reuse_stays_within_an_adapter(tiny: TinyModel, files: HuggingFaceDirectory) -> None:
    """KVC-01, KVC-05: the same prompt on A, B, base and A again; hits only where the adapter is the same."""
    local = engine(files, tiny, num_pages=64)
    ids = prompt(Random(1), 50)
    for target, cached in (("all8", 0), ("qv3", 0), (None, 0), ("all8", 48), (None, 48)):
        key = local.submit(ids, 5, target)
        local.run()
        assert local.tokens[key] == tiny.greedy(target, ids, 5)
        assert local.cached[key] == cached


def test_prompt_log_probabilities(tiny: TinyModel, files: HuggingFaceDirectory) -> None:
    """KVC-09: two overlapping prompts, chunked, in both orders, with a warm prefix cache: the same, and the model's own."""
    shared = prompt(Random(5), 33)
    longer = [*shared, *prompt(Random(6), 8)]
    for order in ((shared, longer), (longer, shared)):
        local = engine(files, tiny, max_prefill_tokens=7)
        for ids in order:
            key = local.submit(ids, 3, "all8", prompt_logprobs=2, logprobs=1)
            local.run()
            logprobs = torch.log_softmax(tiny.logits("all8", [*ids, *local.tokens[key]]), dim=-1)
            scores = local.prompt_scores[key]
            assert [s.token_id for s in scores] == ids[1:]
            for position, score in enumerate(scores):
                row = logprobs[position]
                assert math.isclose(score.logprob, float(row[ids[position + 1]]), abs_tol=1e-4)
                assert [t for t, _ in score.top] == row.topk(2).indices.tolist()
            for offset, sampled in enumerate(local.logprobs[key]):
                row = logprobs[len(ids) - 1 + offset]
                assert math.isclose(sampled.logprob, float(row[sampled.token_id]), abs_tol=1e-4)


def test_seeded_sampling_alone_and_in_a_batch(tiny: TinyModel, files: HuggingFaceDirectory) -> None:
    """SAM-01, SAM-13, SAM-17: a row's draw does not depend on neighbours, whatever those ask for."""
    ids = prompt(Random(7), 10)
    options = {"temperature": 1.1, "seed": 42, "top_p": 0.9}
    alone = engine(files, tiny)
    key = alone.submit(ids, 12, "qv3", **options)
    alone.run()
    crowd = engine(files, tiny)
    crowd.submit(prompt(Random(8), 21), 9, None, temperature=2.0, top_k=3, seed=1)
    same = crowd.submit(ids, 12, "qv3", **options)
    greedy = crowd.submit(ids, 12, "all8")
    crowd.submit(ids, 5, None, frequency_penalty=1.05, logit_bias=((3, 5.0),), logprobs=4, min_tokens=2)
    crowd.run()
    assert crowd.tokens[same] == alone.tokens[key]
    assert crowd.tokens[greedy] == tiny.greedy("all8", ids, 12)


def test_adapters_rotate_through_a_small_bank(tiny: TinyModel, files: HuggingFaceDirectory) -> None:
    """LIF-15, LIF-11, KER-07: more adapters than the bank holds, base traffic beside them, a larger rank after a small."""
    local = engine(files, tiny, rank_rows=12, max_adapters=1)
    random = Random(9)
    asked = [(target, prompt(random, 11)) for target in ("qv3", "mlp12", None, "all8", "q4", "qv3", None)]
    keys = [local.submit(ids, 4, target) for target, ids in asked]
    local.run()
    assert [local.tokens[key] for key in keys] == [tiny.greedy(target, ids, 4) for target, ids in asked]
    assert local.engine.scheduler.bank.num_evictions >= 3


def test_adapters_loaded_ahead_are_the_right_ones(tiny: TinyModel, files: HuggingFaceDirectory) -> None:
    """While one request runs, the next one's adapter takes the place of the one before."""
    local = engine(files, tiny, rank_rows=24, max_adapters=2, max_running=1, prefetch=True)
    random = Random(12)
    asked = [(target, prompt(random, 11)) for target in ("qv3", "mlp12", None, "all8", "q4", "qv3", "mlp12")]
    keys = [local.submit(ids, 4, target) for target, ids in asked]
    local.run()
    assert [local.tokens[key] for key in keys] == [tiny.greedy(target, ids, 4) for target, ids in asked]
    assert local.num_ahead >= 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_is_never_read_before_it_is_written(tiny: TinyModel, files: HuggingFaceDirectory, backend: str) -> None:
    """Pages and rank rows are allocated without being filled: whatever stood there shows in no answer."""
    local = engine(files, tiny, backend, num_pages=8, rank_rows=16, graph_batch=4 if backend == "triton" else 0)
    for layer in local.runner._kv:
        layer.k_pages.fill_(math.nan)
        layer.v_pages.fill_(math.nan)
    for bank in local.runner._banks.values():
        bank._a.fill_(math.nan)
        bank._b.fill_(math.nan)
    random = Random(11)
    asked = [(target, prompt(random, 19)) for target in (None, "qv3", "mlp12")]
    keys = [local.submit(ids, 3, target) for target, ids in asked]
    local.run()
    assert [local.tokens[key] for key in keys] == [tiny.greedy(target, ids, 3) for target, ids in asked]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_server_without_adapters_needs_no_bank(tiny: TinyModel, files: HuggingFaceDirectory, backend: str) -> None:
    local = engine(files, tiny, backend, rank_rows=0, graph_batch=4 if backend == "triton" else 0)
    ids = prompt(Random(13), 9)
    key = local.submit(ids, 3)
    local.run()
    assert local.tokens[key] == tiny.greedy(None, ids, 3)
    assert local.runner.info.adapter_bytes == 0


def test_many_pages_cost_nothing_until_they_are_used(tiny: TinyModel, files: HuggingFaceDirectory) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    local = engine(files, tiny, num_pages=2**17)
    assert local.runner.info.kv_bytes >= 2**30
    assert process.memory_info().rss - before < 2**27


def test_the_base_never_changes(tiny: TinyModel, files: HuggingFaceDirectory, tmp_path: Path) -> None:
    local = engine(files, tiny)
    ids = prompt(Random(10), 9)
    before = local.submit(ids, 8)
    local.run()
    for target in ADAPTERS:
        local.submit(ids, 4, target)
    local.run()
    after = local.submit(ids, 8, min_tokens=0)
    local.run()
    assert local.tokens[before] == local.tokens[after] == tiny.greedy(None, ids, 8)
