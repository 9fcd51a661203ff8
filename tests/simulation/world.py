"""A simulated model server: the real engine and scheduler, a cost model for a runner, a virtual clock, seeded users."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from model_server import messages
from model_server.adapter_bank import HostAdapter, Load
from model_server.cold_adapters import MAX_DOWNLOADS
from model_server.engine import Engine
from model_server.request import AdapterRef, Finish, Request, Sampling, State
from model_server.runner import RunnerInfo
from model_server.scheduler import Limits, Plan
from model_server.simulated_runner import SimulatedRunner, VirtualClock, expected_token

VOCAB = 97
GROUPS = ("qkv", "o", "gate_up", "down")


def ref(name: str) -> AdapterRef:
    return AdapterRef(name, f"sha256:{name}")


@dataclass
class User:
    """What a simulated client saw of its request."""

    key: int
    prompt_ids: list[int]
    sampling: Sampling
    adapter: AdapterRef | None
    tenant: str
    priority: int
    submitted_s: float
    tokens: list[int] = field(default_factory=list)
    num_started: int = 0
    started_s: float | None = None
    ended: messages.Ended | None = None
    ended_s: float | None = None


class World:
    """`ranks`: adapter name to rank; a download takes `fetch_s`, reading up to `read_s`; adapters in `broken` fail to load."""

    def __init__(
        self,
        seed: int = 0,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        rank_rows: int = 32,
        max_adapters: int = 4,
        max_rank: int | None = None,
        ranks: dict[str, int] | None = None,
        broken: frozenset[str] = frozenset(),
        fetch_s: float = 0.2,
        prefix_cache: bool = True,
        host_bytes_limit: int = 10**9,
        **limits: Any,
    ) -> None:
        self.random = Random(seed)
        self.clock = VirtualClock()
        info = RunnerInfo(
            model_name="simulated",
            num_pages=num_pages,
            page_size=page_size,
            kv_bytes=0,
            adapter_bytes=0,
            num_rank_rows=dict.fromkeys(GROUPS, rank_rows),
            max_adapters=max_adapters,
            max_rank=max_rank or rank_rows,
            context_length=num_pages * page_size,
            vocab_size=VOCAB,
            eos_token_ids=(0,),
        )
        self.ranks = ranks or {}
        self.broken = broken
        self.fetch_s = self.read_s = fetch_s
        self.runner = SimulatedRunner(info, self.clock)
        # fixed_rows: of the runner's cost model.
        limits = {"max_batch_tokens": 64, "max_prefill_tokens": 32, "max_running": 16, "fixed_rows": 20.0} | limits
        self.engine = Engine(
            self.runner,
            self,
            Limits(page_size=page_size, **limits),
            host_bytes_limit=host_bytes_limit,
            clock=self.clock,
            emit=self._event,
            prefix_cache=prefix_cache,
            check_every_step=True,
        )
        # Every load ahead is looked at as it is decided.
        self._prefetch = self.engine.scheduler._prefetch
        self.engine.scheduler._prefetch = self._check_prefetch
        self._prefetched: dict[AdapterRef, list[Request]] = {}  # and who waited for it then
        self.num_prefetches = 0
        self.users: dict[int, User] = {}
        self.pinned: dict[AdapterRef, None] = {}  # as an operator knows it
        self.pin_answers: dict[int, messages.Failure | None] = {}
        self._pins: dict[int, AdapterRef] = {}
        self._keys = itertools.count(1)
        self._due: list[tuple[float, int, Any]] = []
        self._sequence = itertools.count()
        self.num_loads: Counter[AdapterRef] = Counter()
        self.on_disk: set[AdapterRef] = set()
        self.held: set[AdapterRef] = set()  # of these, kept there for the engine
        self.num_downloading = 0
        self.trace: list[tuple[float, str]] = []

    # Users -----------------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: list[int] | int,
        max_tokens: int = 8,
        *,
        adapter: str | None = None,
        tenant: str = "t",
        priority: int = 1,
        deadline_s: float | None = None,
        ignore_eos: bool = True,
        **sampling: Any,
    ) -> User:
        prompt_ids = [self.random.randrange(1, VOCAB) for _ in range(prompt)] if isinstance(prompt, int) else prompt
        params = Sampling(max_tokens=max_tokens, ignore_eos=ignore_eos, **sampling)
        target = ref(adapter) if adapter else None
        user = User(next(self._keys), prompt_ids, params, target, tenant, priority, self.clock.now_s)
        self.users[user.key] = user
        self.engine.handle(
            messages.Submit(
                user.key,
                f"r{user.key}",
                list(prompt_ids),
                params,
                target,
                priority,
                tenant,
                self.clock.now_s,
                deadline_s,
            )
        )
        return user

    def cancel(self, user: User) -> None:
        self.engine.handle(messages.Cancel(user.key))

    def pin(self, name: str) -> int:
        """Its answer comes in `pin_answers`, under the key returned."""
        key = next(self._keys)
        self._pins[key] = ref(name)
        self.engine.handle(messages.Pin(key, ref(name)))
        return key

    def unpin(self, name: str) -> None:
        self.pinned.pop(ref(name), None)
        self.engine.handle(messages.Unpin(ref(name)))

    # Time ------------------------------------------------------------------------------------------------------------

    def at(self, when_s: float, action: Any) -> None:
        heapq.heappush(self._due, (when_s, next(self._sequence), action))

    def step(self) -> bool:
        """One engine step, or a jump to the next thing that happens. False when nothing will."""
        while self._due and self._due[0][0] <= self.clock.now_s:
            heapq.heappop(self._due)[2]()
        computed = self.engine.step()
        resident = self.engine.scheduler.bank.resident
        assert self.pinned.keys() <= resident.keys(), "a pinned adapter was evicted"
        if computed and self.engine.has_work:
            return True
        # As its process does: an engine without work is not called before something happens.
        self.engine.rest()
        deadline_s = self.engine.next_deadline_s()
        times = [t for t in (deadline_s, self._due[0][0] if self._due else None) if t is not None]
        if not times:
            assert not self.engine.has_work, "work is left and nothing will ever run it"
            return False
        self.clock.now_s = max(self.clock.now_s, min(times))
        return True

    def run(self, max_steps: int = 100_000) -> None:
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError("did not come to an end")

    # The engine's other sides ----------------------------------------------------------------------------------------

    def start(self, adapter: AdapterRef, path: str) -> None:
        """The loader protocol."""
        self.num_loads[adapter] += 1
        if adapter.adapter_id in self.broken:
            result: Any = messages.Failure("FAILED_PRECONDITION", "broken")
        else:
            rank = self.ranks[adapter.adapter_id]
            result = HostAdapter(dict.fromkeys(GROUPS, rank), rank * 100, adapter.revision)
        delay_s = self.random.random() * self.read_s
        self.at(self.clock.now_s + delay_s, lambda: self.engine.adapter_loaded(adapter, result))

    def _check_prefetch(self, order: Iterable[Request], plan: Plan) -> Load | None:
        scheduler = self.engine.scheduler
        waiting, before = list(order), set(scheduler.bank.resident)
        used = {request.adapter for request in scheduler.running}
        for gone in [r for r in self._prefetched if r in used or r not in before]:
            del self._prefetched[gone]  # it served, or an admission took its place
        load = self._prefetch(waiting, plan)
        evicted = before - scheduler.bank.resident.keys()
        if load is None:
            assert not evicted
            return None
        self.num_prefetches += 1
        assert load.ref not in before and plan.chunks
        ahead = itertools.takewhile(lambda request: request.adapter != load.ref, waiting)
        needed = {request.adapter for request in (*ahead, *plan.preempted)}
        assert not evicted & (needed | used | scheduler.bank.pinned.keys()), "a prefetch evicted what was needed before"
        for lost in evicted & self._prefetched.keys():
            still = [request for request in self._prefetched[lost] if request.state is State.WAITING]
            assert not still, "a prefetch evicted another's before its request ran"
        self._prefetched[load.ref] = [request for request in scheduler.waiting if request.adapter == load.ref]
        assert self._prefetched[load.ref], "nobody waits for what was loaded ahead"
        return load

    def _event(self, event: Any) -> None:
        now_s = self.clock.now_s
        match event:
            case messages.AdapterWanted(wanted, download):
                if wanted in self.on_disk:
                    self._answer_in(0.0, messages.AdapterFetched(wanted, ""))
                elif download:
                    self.num_downloading += 1
                    assert self.num_downloading <= MAX_DOWNLOADS
                    self._answer_in(self.fetch_s, messages.AdapterFetched(wanted, ""))
                else:
                    self._answer_in(0.0, messages.AdapterMissing(wanted))
            case messages.AdapterDone(done, _):
                assert done in self.held, "files given back that were not held"
                self.held.discard(done)
            case messages.Started(key):
                self.users[key].num_started += 1
                self.users[key].started_s = now_s
            case messages.Tokens(key, index, sampled):
                user = self.users[key]
                assert user.ended is None, "a token after the end"
                assert index == len(user.tokens), "tokens out of order"
                user.tokens += [s.token_id for s in sampled]
            case messages.Ended():
                user = self.users[event.key]
                assert user.ended is None, "ended twice"
                user.ended, user.ended_s = event, now_s
            case messages.PinEnded(key, failure):
                assert key not in self.pin_answers, "a pin answered twice"
                self.pin_answers[key] = failure
                if failure is None:
                    self.pinned[self._pins[key]] = None
        self.trace.append((now_s, repr(event)))

    def _answer_in(self, delay_s: float, answer: Any) -> None:
        def give() -> None:
            if isinstance(answer, messages.AdapterFetched):
                assert answer.ref not in self.held, "files handed out twice"
                self.num_downloading -= answer.ref not in self.on_disk
                self.on_disk.add(answer.ref)
                self.held.add(answer.ref)
            self.engine.handle(answer)

        self.at(self.clock.now_s + delay_s, give)

    # What must hold when all is over ---------------------------------------------------------------------------------

    def check_answers(self) -> None:
        """Every request ended once, with exactly the tokens it would get alone."""
        for user in self.users.values():
            assert user.ended is not None, f"request {user.key} never ended"
            assert user.num_started <= 1
            revision = user.adapter.revision if user.adapter else ""
            known = list(user.prompt_ids)
            for token in user.tokens:
                assert token == expected_token(known, revision, VOCAB), f"request {user.key} got another's token"
                known.append(token)
            if user.ended.finish is Finish.LENGTH:
                assert len(user.tokens) == user.sampling.max_tokens
            assert user.ended.num_output == len(user.tokens)
        pool = self.engine.scheduler.pool
        assert pool.num_free == pool.num_pages, "pages leaked"
        self.engine.scheduler.check_integrity()
        assert not self.held, "files are still held for the engine"
        assert self.pin_answers.keys() == self._pins.keys(), "a pin was never answered"
        assert self.engine.scheduler.bank.pinned.keys() == self.pinned.keys(), "a pin was lost or leaked"
