"""The engine: inbox → schedule → run → emit. One step at a time, one owner of the device, no telemetry, no I/O of its own.

It takes messages (`handle`), turns (`step`) and hands out events (`emit`). Whatever computes is behind `Runner`, whatever
reads adapters behind `Loader`, time is `clock`: the same code runs a real model and a simulation of a million requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Protocol

from model_server import messages
from model_server.adapter_bank import AdapterBank, HostAdapter
from model_server.cold_adapters import ColdAdapters
from model_server.page_pool import PagePool
from model_server.prefix_cache import PrefixCache
from model_server.request import AdapterRef, Finish, Request, State
from model_server.runner import Chunk, Runner, StepResult
from model_server.scheduler import Limits, Scheduler

STATUS_INTERVAL_S = 0.1
_SPARE_DEADLINES = 64
# How often the books are verified while there is nothing to do.
_CHECK_INTERVAL_S = 30.0


class Loader(Protocol):
    """Reads fetched adapters into host memory, beside the steps; the result comes back as `Engine.adapter_loaded`."""

    def start(self, ref: AdapterRef, path: str) -> None: ...


class Engine:
    def __init__(
        self,
        runner: Runner,
        loader: Loader,
        limits: Limits,
        *,
        host_bytes_limit: int,
        clock: Callable[[], float],
        emit: Callable[[Any], None],
        prefix_cache: bool = True,
        check_every_step: bool = False,
    ) -> None:
        info = runner.info
        self._runner = runner
        self._loader = loader
        self._clock = clock
        self._emit = emit
        self._check_every_step = check_every_step
        pool = PagePool(info.num_pages)
        bank = AdapterBank(info.num_rank_rows, info.max_adapters, info.max_rank, host_bytes_limit)
        self.scheduler = Scheduler(limits, pool, bank, PrefixCache(pool, limits.page_size) if prefix_cache else None)
        self._requests: dict[int, Request] = {}
        self._keys: dict[Request, int] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._eos = frozenset(info.eos_token_ids)
        self._cold = ColdAdapters()
        self._pinning: dict[AdapterRef, list[int]] = {}  # keys of Pin messages to be answered
        self._host_bytes_limit = host_bytes_limit
        self._step = 0
        self._status_due_s = 0.0
        self._check_due_s = 0.0
        self._last_status: messages.Status | None = None

    # Messages --------------------------------------------------------------------------------------------------------

    def handle(self, message: Any) -> None:
        match message:
            case messages.Submit():
                self._submit(message)
            case messages.Cancel(key):
                request = self._requests.get(key)
                if request is not None:  # else it ended on its own while the cancel was on its way
                    self._end(request, Finish.CANCELLED)
            case messages.Pin(key, ref):
                self._pin(key, ref)
            case messages.Unpin(ref):
                self.scheduler.bank.unpin(ref)
                self._answer_pins(
                    ref, messages.Failure("ABORTED", f"adapter {ref.adapter_id} was unpinned before it was resident")
                )
            case messages.AdapterFetched(ref, path):
                self._cold.on_disk(ref, path)
            case messages.AdapterMissing(ref):
                self._cold.missing(ref)
            case messages.AdapterFetchFailed(ref, failure):
                self._adapter_failed(ref, failure)
            case _:
                raise TypeError(f"unknown message {message!r}")

    def _submit(self, message: messages.Submit) -> None:
        request = Request(
            request_id=message.request_id,
            prompt_ids=message.prompt_ids,
            sampling=message.sampling,
            adapter=message.adapter,
            priority=message.priority,
            tenant=message.tenant,
            arrived_s=message.arrived_s,
            deadline_s=message.deadline_s,
        )
        self._requests[message.key] = request
        self._keys[request] = message.key
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, message.key))
            # Where most are of requests that have ended:
            if len(self._deadlines) > 2 * len(self._requests) + _SPARE_DEADLINES:
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self._requests]
                heapq.heapify(self._deadlines)
        self.scheduler.submit(request, self._clock())

    # Adapters --------------------------------------------------------------------------------------------------------

    def _bring_in_adapters(self) -> None:
        """They come in as fast as host memory takes them: what requests hold stays within the limit and the few that are
        being read. One at a time may exceed it: when nothing runs that could give memory back, or when it has waited so
        long that others would keep it out for ever."""
        now_s, scheduler = self._clock(), self.scheduler
        pins = [ref for ref in self._pinning if not scheduler.bank.has_host(ref)]
        # An operator's word comes before any request.
        order = pins + [ref for ref in scheduler.parked_in_order(now_s) if ref not in self._pinning]
        for ref in self._cold.to_let_go(order):
            self._emit(messages.AdapterDone(ref, readable=True))
        for ref, download in self._cold.to_ask(order):
            self._emit(messages.AdapterWanted(ref, download))
        if not order:
            return

        def may_exceed(ref: AdapterRef) -> bool:
            overdue = ref in self._pinning or now_s - scheduler.parked_since_s(ref) >= scheduler.limits.ageing_s
            return overdue or not self.has_work

        full = scheduler.bank.num_bytes_in_use >= self._host_bytes_limit
        for ref, path in self._cold.to_read(order, may_exceed if full else None):
            self._loader.start(ref, path)

    def adapter_loaded(self, ref: AdapterRef, result: HostAdapter | messages.Failure) -> None:
        damaged = isinstance(result, messages.Failure) and result.damaged_files
        self._emit(messages.AdapterDone(ref, readable=not damaged))
        if isinstance(result, messages.Failure):
            self._adapter_failed(ref, result)
        elif not self.scheduler.bank.fits(result):
            need, have = max(result.rank_rows.values()), self._runner.info.num_rank_rows
            self._adapter_failed(
                ref,
                messages.Failure(
                    "FAILED_PRECONDITION",
                    f"adapter {ref.adapter_id}: its rank {need} exceeds the {max(have.values())} rank rows of this server",
                ),
            )
        else:
            self._cold.gone(ref)
            self.scheduler.bank.add_host(ref, result)
            self.scheduler.adapter_ready(ref, self._clock())
            if ref in self._pinning:
                self._keep_resident(ref)

    def _adapter_failed(self, ref: AdapterRef, failure: messages.Failure) -> None:
        self._cold.gone(ref)
        for request in self.scheduler.adapter_failed(ref):
            self._report_end(request, Finish.FAILED, failure=failure, parked=True)
        self._answer_pins(ref, failure)

    # Pins ------------------------------------------------------------------------------------------------------------

    def _pin(self, key: int, ref: AdapterRef) -> None:
        self._pinning.setdefault(ref, []).append(key)
        if self.scheduler.bank.has_host(ref):
            self._keep_resident(ref)

    def _keep_resident(self, ref: AdapterRef) -> None:
        """The next step makes it resident, and answers."""
        bank = self.scheduler.bank
        if bank.can_pin(ref):
            bank.pin(ref)
            return
        reason = (
            f"adapter {ref.adapter_id} cannot be pinned: with the {len(bank.pinned)} pinned already it would leave other "
            f"adapters no place with {bank.max_rank} rank rows, which this server's largest rank may need"
        )
        self._answer_pins(ref, messages.Failure("RESOURCE_EXHAUSTED", reason))

    def _answer_pins(self, ref: AdapterRef, failure: messages.Failure | None) -> None:
        for key in self._pinning.pop(ref, ()):
            self._emit(messages.PinEnded(key, failure))

    # Steps -----------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def next_deadline_s(self) -> float | None:
        """When `step` must be called even without work: the earliest deadline of a request that is still here."""
        while self._deadlines and self._deadlines[0][1] not in self._requests:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def step(self) -> bool:
        """One turn. False when there was nothing to compute."""
        now_s = self._clock()
        self._expire(now_s)
        self._bring_in_adapters()
        plan = self.scheduler.schedule(now_s)
        for request in plan.admitted:
            self._emit(messages.Started(self._keys[request], request.num_cached))
        for load in plan.loads:
            self._runner.load_adapter(load.index, load.rows, load.weights)
        for ref in [ref for ref in self._pinning if ref in self.scheduler.bank.pinned]:
            self._answer_pins(ref, None)
        if plan.chunks:
            result = self._runner.run(plan.chunks, plan.ahead)
            self._step += 1
            self._apply(plan.chunks, result)
            if not self.has_work:
                self._bring_in_adapters()  # what has ended gave memory back, and there may be no next step
        if self._check_every_step:
            self.scheduler.check_integrity()
        self._report_status()
        return bool(plan.chunks)

    def rest(self) -> None:
        """For when there is nothing to do and everything is sent: verifies the books, now and then."""
        now_s = self._clock()
        if now_s >= self._check_due_s:
            self._check_due_s = now_s + _CHECK_INTERVAL_S
            self.scheduler.check_integrity()

    def _expire(self, now_s: float) -> None:
        deadline_s = self.next_deadline_s()
        while deadline_s is not None and deadline_s <= now_s:
            _, key = heapq.heappop(self._deadlines)
            self._end(self._requests[key], Finish.DEADLINE)
            deadline_s = self.next_deadline_s()

    def _apply(self, chunks: list[Chunk], result: StepResult) -> None:
        now_s = self._clock()
        for index, (chunk, token) in enumerate(zip(chunks, result.sampled, strict=True)):
            request = chunk.request
            if index in result.scored:
                self._emit(messages.PromptScored(self._keys[request], result.scored[index]))
                request.num_scored = chunk.scored.stop
            self.scheduler.computed(chunk)
            if token is None:
                continue
            self.scheduler.sampled(request, token.token_id)
            if request.first_token_s is None:
                request.first_token_s = now_s
            request.last_token_s = now_s
            self._emit(messages.Tokens(self._keys[request], len(request.output_ids) - 1, [token]))
            finish = self._finish_of(request, token.token_id)
            if finish is not None:
                self._end(request, finish, token.token_id if finish is Finish.STOP else None)

    def _finish_of(self, request: Request, token_id: int) -> Finish | None:
        sampling, num_output = request.sampling, len(request.output_ids)
        if num_output >= sampling.min_tokens:
            if token_id in sampling.stop_token_ids:
                return Finish.STOP
            if token_id in self._eos and not sampling.ignore_eos:
                return Finish.EOS
        return Finish.LENGTH if num_output >= sampling.max_tokens else None

    def _end(self, request: Request, finish: Finish, stop_token_id: int | None = None) -> None:
        parked = request.state is State.PARKED
        self.scheduler.remove(request)
        self._report_end(request, finish, stop_token_id, parked=parked)

    def _report_end(
        self,
        request: Request,
        finish: Finish,
        stop_token_id: int | None = None,
        failure: messages.Failure | None = None,
        *,
        parked: bool = False,
    ) -> None:
        """`parked`: it was until now."""
        if parked:
            assert request.parked_since_s is not None
            request.adapter_load_s = self._clock() - request.parked_since_s
        key = self._keys.pop(request)
        del self._requests[key]
        self._emit(
            messages.Ended(
                key=key,
                finish=finish,
                num_cached=request.num_cached,
                failure=failure,
                num_output=len(request.output_ids),
                stop_token_id=stop_token_id,
                parked_s=request.parked_since_s,
                adapter_load_s=request.adapter_load_s,
                parked=parked,
                first_scheduled_s=request.first_scheduled_s,
                first_token_s=request.first_token_s,
                last_token_s=request.last_token_s,
                num_preemptions=request.num_preemptions,
            )
        )

    def _report_status(self) -> None:
        now_s = self._clock()
        if now_s < self._status_due_s and self.has_work:
            return
        scheduler, cache = self.scheduler, self.scheduler.prefix_cache
        status = messages.Status(
            step=self._step,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            parked=scheduler.num_parked,
            free_pages=scheduler.pool.num_free,
            resident=tuple(scheduler.bank.resident),
            free_rank_rows=scheduler.bank.num_free_rank_rows,
            pinned=tuple(scheduler.bank.pinned),
            prefix_queried_tokens=cache.num_queried_tokens if cache else 0,
            prefix_hit_tokens=cache.num_hit_tokens if cache else 0,
            num_preemptions=scheduler.num_preemptions,
        )
        if status != self._last_status:
            self._last_status = status
            self._status_due_s = now_s + STATUS_INTERVAL_S
            self._emit(status)
