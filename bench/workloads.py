"""What is asked of an engine: workloads by name, from a seed. Pure: the same arguments give the same requests everywhere.

A workload is played `repeats` times. Each repeat is a few named rounds of timed requests; "main" is what a result row is
about, the others are what it is compared with (see reports.py).
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

MAIN = "main"
WARM_UP = "warm-up"
ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
# What prompts are drawn from: below are the special tokens of SmolLM2; every model that is benchmarked has these ids.
_TOKEN_IDS = (256, 32000)
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Request:
    """`adapter` None is the base model. End-of-sequence is ignored: exactly `output_tokens` are generated, greedily."""

    arrival_s: float  # after the round's start
    prompt_ids: tuple[int, ...]
    output_tokens: int
    adapter: str | None = None
    tenant: str = "bench"


@dataclass(frozen=True, slots=True)
class Adapter:
    name: str
    rank: int
    targets: tuple[str, ...] = ALL_TARGETS


Rounds = dict[str, tuple[Request, ...]]


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    adapters: tuple[Adapter, ...]  # all that are registered before the first request
    warm_up: tuple[Request, ...]  # played once, unmeasured: compiles what is compiled, loads what is to be warm
    repeats: tuple[Rounds, ...]
    num_adapters: int  # that one repeat may ask for; the result row's `adapters`
    # At most so many adapters on the device at a time; the result is compared with an engine that has room for all.
    max_resident: int | None = None

    @property
    def requests(self) -> Iterable[Request]:
        yield from self.warm_up
        for rounds in self.repeats:
            for requests in rounds.values():
                yield from requests

    @property
    def max_tokens(self) -> int:
        """The longest prompt plus output."""
        return max(len(request.prompt_ids) + request.output_tokens for request in self.requests)

    @property
    def max_rank(self) -> int:
        return max((adapter.rank for adapter in self.adapters), default=0)


def build(name: str, *, seed: int = 0, repeats: int = 1, **sizes: Any) -> Workload:
    """The workload `name`; `sizes` left out or None take its own defaults.

    Raises ValueError naming an unknown workload, or a size that has no meaning for it or is out of range.
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload: {name!r} is none of {', '.join(WORKLOADS)}")
    make = WORKLOADS[name]
    given = {key: value for key, value in sizes.items() if value is not None}
    meant = set(inspect.signature(make).parameters)
    for key, value in given.items():
        if key not in meant:
            raise ValueError(f"{key}: has no meaning for workload {name}")
        if value <= 0 and (key, value) != ("adapters", 0):
            raise ValueError(f"{key}: must be positive, not {value}")
    if repeats < 1:
        raise ValueError(f"repeats: must be positive, not {repeats}")
    return make(_Draw(np.random.default_rng(seed), name, repeats), **given)


def sizes_of(name: str) -> dict[str, int | float]:
    """The sizes that workload `name` takes, with their defaults."""
    parameters = list(inspect.signature(WORKLOADS[name]).parameters.values())[1:]
    return {parameter.name: parameter.default for parameter in parameters}


class _Draw:
    """Random prompts, and the assembly that all workloads share."""

    def __init__(self, rng: np.random.Generator, name: str, repeats: int) -> None:
        self.rng = rng
        self.name = name
        self.repeats = repeats

    def prompt(self, length: int) -> tuple[int, ...]:
        return tuple(self.rng.integers(*_TOKEN_IDS, size=length).tolist())

    def at_once(
        self, adapters: Sequence[str | None], prompt_tokens: int, output_tokens: int, tenant: str = "bench"
    ) -> tuple[Request, ...]:
        """One request per entry of `adapters`, all at time 0."""
        return tuple(Request(0.0, self.prompt(prompt_tokens), output_tokens, name, tenant) for name in adapters)

    def warm_up_of(self, requests: Sequence[Request]) -> tuple[Request, ...]:
        """As many requests as `requests`, of the same adapters, at once, with few tokens and prompts of their own."""
        return tuple(
            replace(
                r,
                arrival_s=0.0,
                prompt_ids=self.prompt(len(r.prompt_ids)),
                output_tokens=min(_WARM_UP_TOKENS, r.output_tokens),
            )
            for r in requests
        )

    def warm_up_with(self, adapter: Adapter, count: int = 32) -> tuple[Request, ...]:
        """For workloads whose adapters are to be cold: base requests and those of an adapter that is never asked again."""
        names = [adapter.name if index % 2 else None for index in range(count)]
        return self.at_once(names, 16, _WARM_UP_TOKENS)

    def workload(
        self, adapters: Sequence[Adapter], warm_up: tuple[Request, ...], main: Sequence[Request], **more: Any
    ) -> Workload:
        """A workload that repeats one round."""
        rounds = {MAIN: tuple(main)}
        count = sum(adapter.name != WARM_UP for adapter in adapters)
        return Workload(self.name, tuple(adapters), warm_up, (rounds,) * self.repeats, count, **more)

    def cold_workload(self, banks: Sequence[Sequence[Adapter]], warm: Adapter, main: Sequence[Request]) -> Workload:
        """A workload that repeats one round, each time with other adapters of the same `banks` while there are any: once
        loaded they are no longer cold."""
        warm_up = self.warm_up_with(warm)
        shuffled = [
            itertools.cycle(self.rng.permutation([adapter.name for adapter in bank]).tolist()) for bank in banks
        ]
        others = {adapter.name: names for bank, names in zip(banks, shuffled, strict=True) for adapter in bank}
        repeats: list[Rounds] = []
        for _ in range(self.repeats):
            asked = dict.fromkeys(request.adapter for request in main if request.adapter is not None)
            instead: dict[str | None, str] = {name: next(others[name]) for name in asked}
            repeats.append({MAIN: tuple(replace(request, adapter=instead.get(request.adapter)) for request in main)})
        adapters = [adapter for bank in banks for adapter in bank]
        return Workload(self.name, (*adapters, warm), warm_up, tuple(repeats), len(adapters))


def _named(count: int, rank: int, targets: tuple[str, ...] = ALL_TARGETS) -> list[Adapter]:
    return [Adapter(f"adapter-{index:04d}", rank, targets) for index in range(count)]


def _flat(
    draw: _Draw,
    *,
    requests: int = 32,
    prompt_tokens: int = 64,
    output_tokens: int = 64,
    adapters: int = 0,
    rank: int = 16,
) -> Workload:
    """`requests` at once, all of one length, over `adapters` in turn (0: the base model)."""
    bank = _named(adapters, rank)
    names = [bank[i % adapters].name if adapters else None for i in range(requests)]
    main = draw.at_once(names, prompt_tokens, output_tokens)
    return draw.workload(bank, draw.warm_up_of(main), main)


def punica_counts(kind: str, requests: int) -> list[int]:
    """Requests of each adapter, most popular first."""
    if kind == "distinct":
        return [1] * requests
    if kind == "identical":
        return [requests]
    if kind == "uniform":
        count = math.ceil(math.sqrt(requests))
        return [len(range(index, requests, count)) for index in range(count)]
    # Skewed: each next adapter has 1.5 times fewer, at least one, until all requests are dealt out.
    counts: list[int] = []
    share = requests / 3  # the first term of a geometric series of ratio 1/1.5 that sums to `requests`
    while (left := requests - sum(counts)) > 0:
        counts.append(min(left, max(1, round(share))))
        share /= 1.5
    return counts


def _punica(kind: str) -> Callable[..., Workload]:
    def punica(draw: _Draw, *, requests: int = 32, max_total_tokens: int = 2048, rank: int = 16) -> Workload:
        """At once; prompt lengths lognormal(0.8, −1, scale 18), total lengths uniform up to `max_total_tokens`."""
        counts = punica_counts(kind, requests)
        bank = _named(len(counts), rank)
        names = [adapter.name for adapter, count in zip(bank, counts, strict=True) for _ in range(count)]
        draw.rng.shuffle(names)
        prompts = np.clip(-1 + 18 * draw.rng.lognormal(0, 0.8, requests), 1, max(1, max_total_tokens - 2)).astype(int)
        totals = draw.rng.integers(1, max_total_tokens + 1, requests)
        main = [
            Request(0.0, draw.prompt(prompt), max(2, total - prompt), name)
            for prompt, total, name in zip(prompts.tolist(), totals.tolist(), names, strict=True)
        ]
        return draw.workload(bank, draw.warm_up_of(main), main)

    return punica


def _s_lora(
    draw: _Draw,
    *,
    rate: float = 8.0,
    duration_s: float = 10.0,
    cv: float = 1.0,
    alpha: float = 1.0,
    min_tokens: int = 8,
    max_tokens: int = 512,
    adapters: int = 1000,
    rank: int = 8,
) -> Workload:
    """Gamma arrivals, prompt and output uniform on [min_tokens, max_tokens), adapter ⌊n·U^(1/α)⌋. Adapters are cold
    while there are new ones."""
    bank = _named(adapters, rank, ATTENTION_TARGETS)
    warm = Adapter(WARM_UP, rank, ATTENTION_TARGETS)
    main = []
    for arrival_s in _arrivals(draw.rng, rate, duration_s, cv):
        index = int(adapters * draw.rng.random() ** (1 / alpha)) if adapters else None
        prompt, output = draw.rng.integers(min_tokens, max_tokens, 2).tolist()
        main.append(Request(arrival_s, draw.prompt(prompt), output, None if index is None else bank[index].name))
    return draw.cold_workload([bank], warm, main)


def _arrivals(rng: np.random.Generator, rate: float, duration_s: float, cv: float = 1.0) -> list[float]:
    """Times of a renewal process with Gamma gaps: mean 1/rate, coefficient of variation cv (1 is Poisson)."""
    times: list[float] = []
    now = 0.0
    while not times or now < duration_s:
        times.append(now)
        now += float(rng.gamma(1 / cv**2, cv**2 / rate))
    return times


def _chameleon(
    draw: _Draw,
    *,
    rate: float = 4.0,
    duration_s: float = 20.0,
    alpha: float = 1.0,
    min_tokens: int = 8,
    max_tokens: int = 256,
    adapters: int = 100,
) -> Workload:
    """Poisson arrivals; ranks 8 to 128 in equal counts; within a rank the k-th adapter's share is k^−alpha. Adapters are
    cold while there are new ones."""
    ranks = (8, 16, 32, 64, 128)
    bank = [Adapter(f"adapter-{i:04d}", ranks[i % len(ranks)], ATTENTION_TARGETS) for i in range(max(adapters, 5))]
    warm = Adapter(WARM_UP, 16, ATTENTION_TARGETS)
    of_rank = [bank[index :: len(ranks)] for index in range(len(ranks))]
    main = []
    for arrival_s in _arrivals(draw.rng, rate, duration_s):
        same_rank = of_rank[draw.rng.integers(len(ranks))]
        weights = np.arange(1, len(same_rank) + 1) ** -alpha
        adapter = same_rank[draw.rng.choice(len(same_rank), p=weights / weights.sum())]
        prompt, output = draw.rng.integers(min_tokens, max_tokens, 2).tolist()
        main.append(Request(arrival_s, draw.prompt(prompt), output, adapter.name))
    return draw.cold_workload(of_rank, warm, main)


def _slot_thrash(
    draw: _Draw,
    *,
    rate: float = 4.0,
    duration_s: float = 15.0,
    prompt_tokens: int = 64,
    output_tokens: int = 32,
    adapters: int = 16,
    resident: int = 8,
    rank: int = 16,
) -> Workload:
    """Poisson arrivals over more adapters than fit the device at once, every fourth request to the base model."""
    bank = _named(adapters, rank)
    main = []
    for index, arrival_s in enumerate(_arrivals(draw.rng, rate, duration_s)):
        name = None if index % 4 == 0 else bank[draw.rng.integers(adapters)].name
        main.append(Request(arrival_s, draw.prompt(prompt_tokens), output_tokens, name))
    warm_up = draw.at_once([None, *(adapter.name for adapter in bank)], prompt_tokens, _WARM_UP_TOKENS)
    return draw.workload(bank, warm_up, main, max_resident=resident)


STEADY, STORM = "steady", "storm"
QUIET, WARM = "quiet", "warm"


def _cold_storm(
    draw: _Draw,
    *,
    requests: int = 8,
    prompt_tokens: int = 64,
    output_tokens: int = 96,
    adapters: int = 16,
    rate: float = 16.0,
    rank: int = 16,
) -> Workload:
    """`requests` decode steadily while one hot tenant asks each of `adapters` cold adapters for 8 tokens, `rate` a second.

    Rounds: the steady ones alone ("quiet"), with the storm ("main"), and with the same storm again, its adapters now in
    memory ("warm"): what loading costs others is main against warm, what the storm costs them in all is main against quiet.
    """
    steady = draw.at_once([None] * requests, prompt_tokens, output_tokens, tenant=STEADY)
    warm = Adapter(WARM_UP, rank)
    bank: list[Adapter] = [warm]
    repeats: list[Rounds] = []
    for repeat in range(draw.repeats):
        # Once loaded they are no longer cold: every repeat has its own.
        cold = [Adapter(f"cold-{repeat}-{index:04d}", rank) for index in range(adapters)]
        bank += cold
        storm = tuple(
            Request(0.5 + index / rate, draw.prompt(16), _WARM_UP_TOKENS, adapter.name, tenant=STORM)
            for index, adapter in enumerate(cold)
        )
        repeats.append({QUIET: steady, MAIN: steady + storm, WARM: steady + storm})
    return Workload(draw.name, tuple(bank), draw.warm_up_with(warm, requests + 8), tuple(repeats), adapters)


FLOOD, CALM = "flood", "calm"


def _two_tenants(
    draw: _Draw,
    *,
    requests: int = 128,
    prompt_tokens: int = 64,
    output_tokens: int = 32,
    adapters: int = 2,
    rank: int = 16,
) -> Workload:
    """One tenant sends three quarters of `requests` at once, the other its quarter just after. Each has adapters of its own.

    While both have work, a fair server serves them alike.
    """
    bank = _named(adapters, rank)
    names: list[str | None] = [adapter.name for adapter in bank] or [None]
    flooding, calm = names[::2], names[1::2] or names
    count = max(1, requests // 4)
    main = draw.at_once(
        [flooding[i % len(flooding)] for i in range(requests - count)], prompt_tokens, output_tokens, FLOOD
    )
    later = draw.at_once([calm[i % len(calm)] for i in range(count)], prompt_tokens, output_tokens, CALM)
    main += tuple(replace(request, arrival_s=0.05) for request in later)
    return draw.workload(bank, draw.warm_up_of(main[-32:]), main)


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "flat": _flat,
    **{f"punica-{kind}": _punica(kind) for kind in ("distinct", "uniform", "skewed", "identical")},
    "s-lora": _s_lora,
    "chameleon": _chameleon,
    "slot-thrash": _slot_thrash,
    "cold-storm": _cold_storm,
    "two-tenants": _two_tenants,
}
