"""How a request was computed never shows in its answer: chunks, preemption, neighbours, padding, loads, what the pages held
before. The real engine and runner; answers are those of transformers and PEFT for the request alone."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.cpu.ops import CpuOps
from kernels.ops import Ops
from kernels.reference.ops import ReferenceOps
from kernels.triton_ops import TritonOps
from model_server import messages
from model_server.request import Finish
from model_server.scheduler import Plan
from model_server.weights.huggingface import HuggingFaceDirectory
from tests.model_server.local_engine import LocalEngine
from tests.model_server.tiny import ALL, VOCAB, TinyModel

MAX_TOKENS = 64
BACKENDS = ("reference", "cpu", "triton")
Asked = list[tuple[str | None, list[int]]]


def prompt(seed: int, length: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB) for _ in range(length)]


class Engines:
    """Makes engines on the tiny model. `adapters` may be added to."""

    def __init__(self, tiny: TinyModel, files: HuggingFaceDirectory) -> None:
        self.tiny = tiny
        self.files = files
        self.adapters = dict(tiny.adapters)

    def __call__(self, backend: str = "cpu", **options: Any) -> LocalEngine:
        ops: Ops
        match backend:
            case "reference":
                ops = ReferenceOps()
            case "triton":
                ops = TritonOps(MAX_TOKENS, "cpu")
            case _:
                ops = CpuOps()
        limits = {"max_batch_tokens": MAX_TOKENS, "max_running": 8, "max_prefill_tokens": 32} | options
        return LocalEngine(self.files, ops, self.adapters, **limits)

    def alone(self, asked: Asked, num_tokens: int) -> list[list[int]]:
        return [self.tiny.greedy(target, ids, num_tokens) for target, ids in asked]


@pytest.fixture
def engines(tiny: TinyModel, files: HuggingFaceDirectory) -> Engines:
    return Engines(tiny, files)


def answers(local: LocalEngine, asked: Asked, num_tokens: int, **sampling: Any) -> list[list[int]]:
    keys = [local.submit(ids, num_tokens, target, **sampling) for target, ids in asked]
    local.run()
    return [local.tokens[key] for key in keys]


# Chunks and preemption ------------------------------------------------------------------------------------------------


def test_chunks_of_every_size(engines: Engines) -> None:
    asked: Asked = [("all8", prompt(1, 33)), (None, prompt(2, 20)), ("qv3", prompt(3, 17))]
    expected = engines.alone(asked, 3)
    for size in range(1, 35):
        assert answers(engines(max_prefill_tokens=size), asked, 3) == expected, size


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_beside_decodes(engines: Engines, backend: str) -> None:
    """KER-03: chunks that yield no token stand between rows of other adapters that do."""
    early: Asked = [("qv3", prompt(4, 3)), (None, prompt(5, 2))]
    late: Asked = [("all8", prompt(6, 40)), (None, prompt(7, 40)), ("qv3", prompt(8, 40))]
    num_early, sizes = 12, [16, MAX_TOKENS]
    if backend == "triton":  # interpreted, each step takes a second
        late, num_early, sizes = [("all8", prompt(6, 20))], 4, [8]
    for size in sizes:
        local = engines(backend, max_prefill_tokens=size)
        keys = [local.submit(ids, num_early, target) for target, ids in early]
        local.engine.step()
        keys += [local.submit(ids, 2, target) for target, ids in late]
        local.run()
        expected = engines.alone(early, num_early) + engines.alone(late, 2)
        assert [local.tokens[key] for key in keys] == expected, size


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_everyone_preempted_after_every_step(engines: Engines, prefix_cache: bool) -> None:
    """SCH-01: each token is computed from nothing but what was said so far, and told once."""
    asked: Asked = [("all8", prompt(9, 20)), (None, prompt(10, 15)), ("qv3", prompt(11, 16))]
    local = engines(max_prefill_tokens=MAX_TOKENS, prefix_cache=prefix_cache)
    keys = [local.submit(ids, 12, target) for target, ids in asked]
    scheduler = local.engine.scheduler
    while local.engine.has_work:
        local.engine.step()
        for request in list(scheduler.running):
            scheduler._preempt(request, Plan())
    assert [local.tokens[key] for key in keys] == engines.alone(asked, 12)
    assert scheduler.num_preemptions >= 3 * 11


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preempted_once_at_each_step(engines: Engines, prefix_cache: bool) -> None:
    """SCH-01: within a prompt too, and with pages for one request and a half, so that one waits for the other's."""
    asked: Asked = [("all8", prompt(12, 20)), ("qv3", prompt(13, 18))]
    expected = engines.alone(asked, 14)
    for step in range(1, 22):
        local = engines(num_pages=4, max_prefill_tokens=9, prefix_cache=prefix_cache)
        keys = [local.submit(ids, 14, target) for target, ids in asked]
        for _ in range(step):
            local.engine.step()
        scheduler = local.engine.scheduler
        if scheduler.running:
            scheduler._preempt(next(iter(scheduler.running)), Plan())
        local.run()
        assert [local.tokens[key] for key in keys] == expected, step


# Adapters -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_base_with_and_without_a_loaded_adapter(engines: Engines, backend: str) -> None:
    """KER-01: two places, none taken; one taken; one used in the same step."""
    ids = prompt(14, 11)
    expected = engines.tiny.greedy(None, ids, 3)
    local = engines(backend, max_adapters=2)
    assert answers(local, [(None, ids)], 3) == [expected]
    assert answers(local, [("all8", ids), (None, ids)], 3) == [engines.tiny.greedy("all8", ids, 3), expected]
    assert answers(local, [(None, ids)], 3) == [expected]


@pytest.mark.parametrize("module", ALL)
def test_an_adapter_of_one_module(engines: Engines, tmp_path: Path, module: str) -> None:
    """KER-15: it changes prefill and decode, exactly as in PEFT."""
    directory = shutil.copytree(engines.adapters["all8"], tmp_path / "one")
    tensors = load_file(directory / "adapter_model.safetensors")
    save_file(
        {key: value for key, value in tensors.items() if f".{module}." in key}, directory / "adapter_model.safetensors"
    )
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(config | {"target_modules": [module]}))
    name = f"only-{module}"
    engines.adapters[name] = directory
    engines.tiny.add_adapter(name, directory)

    ids, forced = prompt(15, 12), 7
    local = engines(max_prefill_tokens=5)
    # The same output on both, so that their probabilities can be compared in decode as well.
    sampling: dict[str, Any] = {"logprobs": 0, "prompt_logprobs": 0, "logit_bias": ((forced, 100.0),)}
    adapted, base = local.submit(ids, 4, name, **sampling), local.submit(ids, 4, None, **sampling)
    local.run()
    scores = {}
    for key, target in ((adapted, name), (base, None)):
        ours = [s.logprob for s in (*local.prompt_scores[key], *local.logprobs[key])]
        told = [*ids, *[forced] * 4]
        theirs = torch.log_softmax(engines.tiny.logits(target, told), dim=-1)
        scores[target] = torch.tensor([theirs[position, token] for position, token in enumerate(told[1:])])
        torch.testing.assert_close(torch.tensor(ours), scores[target], atol=1e-4, rtol=1e-5)
    difference = (scores[name] - scores[None]).abs()
    assert difference[: len(ids) - 1].max() > 0.01 and difference[len(ids) :].max() > 0.01


def test_a_padded_decode(engines: Engines) -> None:
    """KER-05: three rows in a bucket of four, each adapter's first request ever; then the base alone."""
    local = engines("triton", graph_batch=4, max_running=4)
    mixed: Asked = [(None, prompt(16, 2)), ("qv3", prompt(17, 2)), ("all8", prompt(18, 1))]
    assert answers(local, mixed, 2) == engines.alone(mixed, 2)
    assert answers(local, mixed[:1], 2) == engines.alone(mixed[:1], 2)


def test_two_places_for_three_adapters_and_cancels(engines: Engines) -> None:
    """SCH-07: A, B, the base and a long prompt on C; one of them cancelled at each step. No step holds three adapters."""
    asked: Asked = [("qv3", prompt(19, 9)), ("q4", prompt(20, 8)), (None, prompt(21, 7)), ("all8", prompt(22, 40))]
    expected = engines.alone(asked, 6)
    most = 0
    for step in range(10):
        for cancelled in range(len(asked)):
            local = engines(max_adapters=2, max_prefill_tokens=8)
            scheduler = local.engine.scheduler
            keys = [local.submit(ids, 6, target) for target, ids in asked]
            for turn in range(200):
                if turn == step:
                    local.engine.handle(messages.Cancel(keys[cancelled]))
                local.engine.step()
                most = max(most, len({request.adapter for request in scheduler.running} - {None}))
                if not local.engine.has_work:
                    break
            for index, key in enumerate(keys):
                if index == cancelled:
                    assert local.tokens[key] == expected[index][: len(local.tokens[key])]
                    assert local.ended[key].finish in (Finish.CANCELLED, Finish.LENGTH)
                else:
                    assert local.tokens[key] == expected[index], (step, cancelled)
    assert most == 2


# Pages ----------------------------------------------------------------------------------------------------------------


def test_a_new_revision_under_the_same_name(engines: Engines) -> None:
    """KVC-03: nothing that was computed with the old weights is found for the new ones, and the old ones keep theirs."""
    ids = prompt(23, 50)
    engines.adapters["x"] = engines.adapters["all8"]
    local = engines()
    for revision, target, cached in (("v1", "all8", 0), ("v2", "qv3", 0), ("v2", "qv3", 48), ("v1", "all8", 48)):
        engines.adapters["x"] = engines.adapters[target]
        key = local.submit(ids, 5, "x", revision=revision)
        local.run()
        assert local.tokens[key] == engines.tiny.greedy(target, ids, 5), revision
        assert local.cached[key] == cached


def test_pages_belong_to_an_adapter_not_to_its_place(engines: Engines) -> None:
    """KVC-07: KV has no other tier here than pages without a holder. Those of A outlive A in the bank; who is loaded into
    its place misses them, and once they were taken for other requests A itself misses, too."""
    ids = prompt(24, 40)
    local = engines(max_adapters=1, num_pages=16)
    scheduler = local.engine.scheduler

    def ask(target: str | None) -> int:
        key = local.submit(ids, 4, target)
        local.run()
        assert local.tokens[key] == engines.tiny.greedy(target, ids, 4), target
        return local.cached[key]

    assert [ask(target) for target in ("all8", "qv3", "all8", None)] == [0, 0, 32, 0]
    assert scheduler.bank.num_evictions >= 2
    local.submit(prompt(25, 200), 4)  # takes thirteen of the sixteen pages
    local.run()
    assert [ask(target) for target in ("qv3", "all8")] == [0, 0]


# Sampling -------------------------------------------------------------------------------------------------------------


def test_a_seeded_row_whoever_joins_midway(engines: Engines) -> None:
    """SAM-01: neighbours with another seed (every request has one), joining at any step, leaving before the end."""
    ids = prompt(26, 10)
    options: dict[str, Any] = {"temperature": 1.0, "seed": 42}
    (expected,) = answers(engines(), [("qv3", ids)], 10, **options)
    for repeat in range(4):
        local = engines()
        key = local.submit(ids, 10, "qv3", **options)
        for _ in range(1 + 2 * repeat):
            local.engine.step()
        other = local.submit(prompt(27, 14), 3, "all8", temperature=1.0, seed=1000 + repeat)
        local.run()
        assert local.tokens[key] == expected, repeat
        assert len(local.tokens[other]) == 3


def test_the_drawn_tokens_own_log_probability(engines: Engines) -> None:
    """SAM-21: not the likeliest token's, and the model's own, whatever the temperature."""
    ids = prompt(28, 10)
    local = engines()
    keys = {seed: local.submit(ids, 12, "all8", temperature=2.0, seed=seed, logprobs=1) for seed in range(4)}
    local.run()
    unlikely = 0
    for key in keys.values():
        theirs = torch.log_softmax(engines.tiny.logits("all8", [*ids, *local.tokens[key]]), dim=-1)[len(ids) - 1 :]
        for sampled, row in zip(local.logprobs[key], theirs, strict=False):
            assert sampled.logprob is not None
            assert math.isclose(sampled.logprob, float(row[sampled.token_id]), abs_tol=1e-4)
            unlikely += sampled.top[0][0] != sampled.token_id
    assert unlikely > 4
    assert len({tuple(local.tokens[key]) for key in keys.values()}) == 4
