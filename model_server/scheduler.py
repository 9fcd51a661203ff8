"""What the next step computes. Pure: no torch, no grpc, no clock; time is an argument, and every decision can be replayed.

Each step, under a budget of tokens: every running request decodes one token, running prefills go on by chunks, then waiting
requests are admitted. Where the runner copies beside its step (`Limits.prefetch`), one adapter is loaded ahead for those still
waiting. A request holds pages for all its known tokens from admission on, and takes one more as it grows.
When no page is left the least important running request is preempted: it gives up its pages and waits again, to recompute
prompt and output so far (its past output never changes). Importance is (effective class, earlier arrival; of equals, who was
running first): preemption does not change it, so the most important request always proceeds and nothing ping-pongs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice

from model_server.adapter_bank import AdapterBank, Load
from model_server.page_pool import PagePool
from model_server.prefill_budget import PrefillBudget
from model_server.prefix_cache import PrefixCache
from model_server.request import AdapterRef, Request, State
from model_server.runner import Chunk
from model_server.waiting_queue import WaitingQueue

# Waiting requests that do not fit, looked past in one step: bounds what a long queue costs each step.
_MAX_LOOKAHEAD = 64
# The same for those that are held back for the sake of others' decodes.
_MAX_HELD = 256
# How many requests share what others' decodes allow.
_MAX_SHARES = 3


@dataclass(frozen=True, slots=True)
class Limits:
    page_size: int
    max_batch_tokens: int = 512
    max_prefill_tokens: int = 256  # per step: bounds how long one makes decodes and newcomers wait
    max_slowdown: float | None = 1.25  # of a step's decodes by other tenants' prefill; None: as far as the above goes
    fixed_rows: float = 0.0  # a step of n rows takes as long as n + fixed_rows rows
    max_running: int = 64
    max_bypass: int = 16  # admissions past a request that does not fit, before it is waited for
    ageing_s: float = 5.0
    prefetch: bool = False  # whether to load adapters ahead of admission: where that takes no time from the step

    def __post_init__(self) -> None:
        if self.max_batch_tokens < self.max_running:
            raise ValueError(f"max_batch_tokens {self.max_batch_tokens} is below max_running {self.max_running}")
        if self.max_prefill_tokens < 1 or self.max_running < 1:
            raise ValueError("max_prefill_tokens and max_running: want at least 1")
        if self.max_slowdown is not None and not 1 <= self.max_slowdown < math.inf:
            raise ValueError(f"max_slowdown {self.max_slowdown}: want a number of at least 1")


@dataclass(slots=True)
class Plan:
    chunks: list[Chunk] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    ahead: Load | None = None  # to be done beside the chunks: no request of this step needs it
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)


class Scheduler:
    def __init__(self, limits: Limits, pool: PagePool, bank: AdapterBank, prefix_cache: PrefixCache | None) -> None:
        self.limits = limits
        self.pool = pool
        self.bank = bank
        self.prefix_cache = prefix_cache
        self.waiting = WaitingQueue(limits.ageing_s)
        self.parked: dict[AdapterRef, list[Request]] = {}
        self.running: dict[Request, None] = {}
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or len(self.waiting))

    @property
    def num_parked(self) -> int:
        return sum(len(requests) for requests in self.parked.values())

    def requests(self) -> Iterable[Request]:
        yield from self.running
        yield from self.waiting
        for parked in self.parked.values():
            yield from parked

    # Coming and going ------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now_s: float) -> None:
        """Take a request in; parked where its adapter is not in host memory.

        The caller has checked that prompt and output fit the pool, so that it can always run alone.
        """
        self.waiting.enter(request.tenant)
        ref = request.adapter
        if ref is None or self.bank.has_host(ref):
            self._wait(request)
            return
        request.state = State.PARKED
        request.parked_since_s = now_s
        self.parked.setdefault(ref, []).append(request)

    def parked_in_order(self, now_s: float) -> list[AdapterRef]:
        """Adapters that requests are parked for, as the queue would serve the best request of each."""
        rank = self.waiting.rank
        best = {ref: min(rank(r, now_s) for r in requests) for ref, requests in self.parked.items()}
        return sorted(best, key=best.__getitem__)

    def parked_since_s(self, ref: AdapterRef) -> float:
        """Since when the longest has been parked for `ref`."""
        since_s = self.parked[ref][0].parked_since_s
        assert since_s is not None
        return since_s

    def adapter_ready(self, ref: AdapterRef, now_s: float) -> None:
        """Host weights are there (`bank.add_host` was called): its parked requests may run."""
        for request in self.parked.pop(ref, ()):
            assert request.parked_since_s is not None
            request.adapter_load_s = now_s - request.parked_since_s
            self._wait(request)

    def adapter_failed(self, ref: AdapterRef) -> list[Request]:
        """Gives back the requests that asked for it, removed. Nobody else is touched."""
        failed = self.parked.pop(ref, [])
        for request in failed:
            self._gone(request)
        return failed

    def remove(self, request: Request) -> None:
        """Finished, cancelled or expired: everything it holds is free when this returns."""
        match request.state:
            case State.RUNNING:
                self._stop_running(request)
                self._leave_host(request)
            case State.WAITING:
                self.waiting.remove(request)
                self._leave_host(request)
            case State.PARKED:
                assert request.adapter is not None
                parked = self.parked[request.adapter]
                parked.remove(request)
                if not parked:
                    del self.parked[request.adapter]
            case State.FINISHED:
                raise AssertionError(f"{request.request_id} removed twice")
        self._gone(request)

    def _wait(self, request: Request) -> None:
        if request.adapter is not None:
            self.bank.use_host(request.adapter)
        request.state = State.WAITING
        self.waiting.add(request)

    def _gone(self, request: Request) -> None:
        request.state = State.FINISHED
        self.waiting.leave(request.tenant)

    def _leave_host(self, request: Request) -> None:
        if request.adapter is not None:
            self.bank.leave_host(request.adapter)

    # One step --------------------------------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> Plan:
        plan = Plan()
        self._place_pins(now_s, plan)
        budget = self.limits.max_batch_tokens
        by_importance = sorted(self.running, key=lambda r: self._importance(r, now_s), reverse=True)
        prefilling: list[Request] = []
        for request in by_importance:
            if request not in self.running:
                continue  # preempted for a more important one
            if request.num_uncomputed > 1:
                prefilling.append(request)
            elif self._grow(request, by_importance, plan):
                plan.chunks.append(Chunk(request, request.num_computed, 1, samples=True))
                budget -= 1
        prefill = PrefillBudget(
            min(budget, self.limits.max_prefill_tokens),
            [chunk.request for chunk in plan.chunks],
            max_slowdown=self.limits.max_slowdown,
            fixed_rows=self.limits.fixed_rows,
            ageing_s=self.limits.ageing_s,
        )
        self._continue(prefilling, now_s, prefill, plan)
        order = self.waiting.in_order(now_s)
        left = self._admit(order, now_s, prefill, plan) if prefill.left else []
        if self.limits.prefetch and plan.chunks:
            plan.ahead = self._prefetch(chain(left, order), plan)
        return plan

    def _place_pins(self, now_s: float, plan: Plan) -> None:
        """What was pinned since the last step becomes resident in this one. An operator's word comes before any request:
        the least important ones with adapters that may be evicted give way until there is room, which there then is."""
        for ref in self.bank.pinned:
            if ref in self.bank.resident:
                continue
            users = [r for r in self.running if r.adapter is not None and r.adapter not in self.bank.pinned]
            users.sort(key=lambda r: self._importance(r, now_s), reverse=True)
            leaving: list[Request] = []
            while not self._can_acquire(ref, leaving):
                leaving.append(users.pop())
            for victim in _needed(leaving, partial(self._can_acquire, ref)):
                self._preempt(victim, plan)
            plan.loads.append(self.bank.place(ref))

    def computed(self, chunk: Chunk) -> None:
        """The step that ran `chunk` is over: its K and V stand in the pages."""
        request = chunk.request
        before = request.num_computed
        request.num_computed = chunk.start + chunk.length
        if self.prefix_cache is not None:
            self.prefix_cache.publish(request, before)

    def sampled(self, request: Request, token_id: int) -> None:
        request.output_ids.append(token_id)
        self.waiting.charge(request.tenant, output_tokens=1)

    def _importance(self, request: Request, now_s: float) -> tuple[int, float]:
        return self.waiting.effective_class(request, now_s), -request.arrived_s

    def _continue(self, prefilling: list[Request], now_s: float, budget: PrefillBudget, plan: Plan) -> None:
        """Class by class, and in each first those that take little because of others' decodes, which otherwise would wait
        for every earlier prompt of a crowd. A few of them share that little, so that a short prompt does not wait for a
        long one, and where there are fewer a newcomer may join."""
        spared = [r for r in prefilling if budget.spares(r, now_s)]
        shares = min(_MAX_SHARES, len(spared) + self._may_join(now_s, budget))
        by_class = [(-self.waiting.effective_class(r, now_s), not budget.spares(r, now_s), r) for r in prefilling]
        for _, unlimited, request in sorted(by_class, key=lambda entry: entry[:2]):
            if request not in self.running:
                continue  # it gave way
            self._chunk(request, now_s, budget, plan, 1 if unlimited else max(1, shares))
            shares -= not unlimited

    def _may_join(self, now_s: float, budget: PrefillBudget) -> bool:
        """Whether there is room for one more of those whom others' decodes limit, and one that waits."""
        first = islice(self.waiting, _MAX_LOOKAHEAD)
        return len(self.running) < self.limits.max_running and any(budget.spares(request, now_s) for request in first)

    def _chunk(self, request: Request, now_s: float, budget: PrefillBudget, plan: Plan, shares: int = 1) -> None:
        length = min(request.num_uncomputed, -(-budget.of(request, now_s) // shares))
        if length:
            plan.chunks.append(Chunk(request, request.num_computed, length, length == request.num_uncomputed))
            budget.take(request, now_s, length)

    def _grow(self, request: Request, by_importance: list[Request], plan: Plan) -> bool:
        """A page for the token to be fed, taken from the least important if need be. False: `request` itself gave way."""
        if request.num_computed < len(request.page_table) * self.limits.page_size:
            return True
        while not self.pool.num_free:
            victim = next(r for r in reversed(by_importance) if r in self.running)
            self._preempt(victim, plan)
            if victim is request:
                return False
        request.page_table.append(self.pool.allocate())
        return True

    def _admit(self, order: Iterator[Request], now_s: float, budget: PrefillBudget, plan: Plan) -> list[Request]:
        """Returns the requests that it took from `order` and did not admit."""
        left: list[Request] = []
        passed: list[Request] = []  # of these, who did not fit; the others are held back for the sake of decodes
        preempted_before = len(plan.preempted)
        for request in order:
            if request in plan.preempted:
                continue
            if not budget.of(request, now_s):
                left.append(request)
                if len(left) - len(passed) >= _MAX_HELD:
                    break
                continue
            if not self._make_room(request, now_s, plan):
                left.append(request)
                passed.append(request)
                if len(self.running) >= self.limits.max_running or request.num_bypassed >= self.limits.max_bypass:
                    break
                if len(passed) >= _MAX_LOOKAHEAD:
                    break
                continue
            loads_before = len(plan.loads)
            self._start(request, now_s, plan)
            self._chunk(request, now_s, budget, plan)
            budget.take(request, now_s, 0, len(plan.loads) - loads_before)
            for other in passed:
                other.num_bypassed += 1
            if not budget.left or any(other.num_bypassed >= self.limits.max_bypass for other in passed):
                break
        if len(plan.preempted) > preempted_before:
            gone = set(plan.preempted)
            plan.chunks = [chunk for chunk in plan.chunks if chunk.request not in gone]
        return left

    def _prefetch(self, order: Iterable[Request], plan: Plan) -> Load | None:
        """One load for the first request in `order` whose adapter is not on the device, so that its admission waits for
        none. It evicts nothing that runs, is pinned, or that a request further ahead wants; where that makes no room
        nobody further back is looked at, who would only take rows from the one in front."""
        ahead = {request.adapter for request in plan.preempted if request.adapter is not None}
        for request in islice(order, _MAX_LOOKAHEAD):
            if request.adapter is None:
                continue
            if request.adapter not in self.bank.resident:
                return self.bank.prefetch(request.adapter, ahead)
            ahead.add(request.adapter)
        return None

    def _make_room(self, request: Request, now_s: float, plan: Plan) -> bool:
        """Whether `request` can start now, after preempting running requests of lower effective class if that helps."""
        if self._fits(request, ()):
            return True
        own_class = self.waiting.effective_class(request, now_s)
        lower = [r for r in self.running if self.waiting.effective_class(r, now_s) < own_class]
        # Decided before anybody gives way: preempting without making enough room would help nobody.
        if not lower or not self._fits(request, lower):
            return False
        lower.sort(key=lambda r: self._importance(r, now_s))
        victims = next(lower[:count] for count in range(1, len(lower) + 1) if self._fits(request, lower[:count]))
        for victim in _needed(victims, partial(self._fits, request)):
            self._preempt(victim, plan)
        return True

    def _fits(self, request: Request, without: Sequence[Request]) -> bool:
        """Whether it could start if the running requests `without` were preempted."""
        num_running = len(self.running) - len(without)
        if num_running >= self.limits.max_running:
            return False
        if request.adapter is not None and not self._can_acquire(request.adapter, without):
            return False
        matched = self._match(request)
        needed = self._pages_for(request.num_tokens) - len(matched)
        # What is matched and has no holder counts as free in the pool, but is about to be held.
        available = self.pool.num_free - sum(self.pool.is_kept(page) for page in matched)
        if without:
            # Of the victims' pages, those the request itself would take over are not gained either.
            tables = [[page for page in r.page_table if page not in matched] for r in without]
            available += self.pool.num_freed_by(tables)
        # Every running request may soon need a page: do not admit into the last ones only to preempt again.
        return needed + num_running <= available

    def _can_acquire(self, ref: AdapterRef, without: Sequence[Request]) -> bool:
        return self.bank.can_acquire(ref, Counter(r.adapter for r in without if r.adapter is not None))

    def _start(self, request: Request, now_s: float, plan: Plan) -> None:
        matched = self._match(request)
        for page in matched:
            self.pool.hold(page)
        num_new = self._pages_for(request.num_tokens) - len(matched)
        request.page_table = matched + [self.pool.allocate() for _ in range(num_new)]
        request.num_computed = len(matched) * self.limits.page_size
        if request.adapter is not None:
            request.adapter_index, load = self.bank.acquire(request.adapter)
            if load is not None:
                plan.loads.append(load)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now_s
            request.num_cached = request.num_computed
            plan.admitted.append(request)
            self.waiting.charge(request.tenant, prompt_tokens=len(request.prompt_ids) - request.num_cached)
            if self.prefix_cache is not None:
                self.prefix_cache.count(len(request.prompt_ids), request.num_cached)
        self.waiting.remove(request)
        request.state = State.RUNNING
        self.running[request] = None

    def _match(self, request: Request) -> list[int]:
        # Prompt log probabilities need every prompt token's logits: nothing of such a request is taken over.
        if self.prefix_cache is None or request.sampling.prompt_logprobs is not None:
            return []
        return self.prefix_cache.match(request)

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.page_size)

    def _preempt(self, request: Request, plan: Plan) -> None:
        self._stop_running(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.state = State.WAITING
        self.waiting.add(request)
        plan.preempted.append(request)

    def _stop_running(self, request: Request) -> None:
        del self.running[request]
        self.pool.release(reversed(request.page_table))
        request.page_table = []
        request.num_computed = 0
        if request.adapter is not None:
            self.bank.leave(request.adapter)
            request.adapter_index = -1

    # Invariants ------------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise AssertionError unless pages, rank rows and users add up. Cheap enough for every simulated step."""
        self.pool.check_integrity(request.page_table for request in self.requests())
        running = Counter(r.adapter for r in self.running if r.adapter is not None)
        users = running + Counter(r.adapter for r in self.waiting if r.adapter is not None)
        self.bank.check_integrity(running, users)
        for state, requests in ((State.RUNNING, self.running), (State.WAITING, self.waiting)):
            assert all(r.state is state for r in requests)
        for request in self.running:
            assert request.num_computed <= request.num_tokens
            assert len(request.page_table) * self.limits.page_size >= request.num_computed
        assert len(self.running) <= self.limits.max_running


def _needed(victims: list[Request], enough: Callable[[Sequence[Request]], bool]) -> list[Request]:
    """`victims`, least important first and `enough`, without those who give nothing that is needed."""
    for spared in reversed(victims[:-1]):
        others = [victim for victim in victims if victim is not spared]
        if enough(others):
            victims = others
    return victims
