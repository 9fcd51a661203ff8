"""The ModelServer service: proto ↔ domain. Text work happens here, on the way of each request's own stream; the engine sees
token ids only."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
from opentelemetry import trace

from model_server import engine_spans, messages
from model_server.answer import Answer, position_logprobs
from model_server.bridge import Bridge
from model_server.intake import Intake, Parsed, parse_adapter
from model_server.request import AdapterRef, Finish
from model_server.runner import RunnerInfo, Sampled
from model_server.tokenizer import Tokenizer
from protos import common_pb2, errors, model_server_pb2
from protos.model_server_pb2_grpc import ModelServerServicer

_STATUS_INTERVAL_S = 0.1
# The engine's deadline lies this much before the call's, so that its answer, which says in which phase, comes before the cut.
_DEADLINE_MARGIN_S = 0.1
_DEADLINE_MARGIN_SHARE = 0.1
_SEED_STEP = 0x9E3779B97F4A7C15  # odd: choices' seeds differ, and choice 0 keeps the request's own

_Context = grpc.aio.ServicerContext[Any, Any]


class Servicer(ModelServerServicer):
    def __init__(
        self, bridge: Bridge, intake: Intake, tokenizer: Tokenizer, info: RunnerInfo, replica: Callable[[], str]
    ) -> None:
        self._bridge = bridge
        self._intake = intake
        self._tokenizer = tokenizer
        self._info = info
        self._replica = replica
        self._draining = asyncio.Event()

    async def Generate(  # noqa: N802
        self, request: model_server_pb2.ServerGenerateRequest, context: _Context
    ) -> AsyncIterator[common_pb2.GenerateEvent]:
        arrived_s = time.monotonic()
        deadline_s = _deadline_s(context, arrived_s)
        self._check_open()
        parsed = await self._intake.parse(request)
        self._check_open()  # again: from here to `submit` nothing is awaited, so no drain begins that does not see it
        server_span = trace.get_current_span().get_span_context()
        started: messages.Started | None = None
        answers: dict[int, Answer] = {}
        scored: list[Sampled] = []
        echoed = not parsed.echo and parsed.sampling.prompt_logprobs is None
        stream = self._bridge.open(parsed.num_choices, lambda ended: engine_spans.record(ended, server_span, arrived_s))

        def submit() -> None:
            choice = len(answers)
            seed = (parsed.sampling.seed + choice * _SEED_STEP) % 2**63
            key = self._bridge.submit(
                stream,
                request_id=request.request_id,
                prompt_ids=parsed.prompt_ids,
                # The prompt is scored once, with the first choice.
                sampling=dataclasses.replace(
                    parsed.sampling, seed=seed, prompt_logprobs=None if choice else parsed.sampling.prompt_logprobs
                ),
                adapter=parsed.adapter,
                priority=parsed.priority,
                tenant=request.tenant,
                arrived_s=arrived_s,
                deadline_s=deadline_s,
            )
            answers[key] = Answer(choice, self._tokenizer, parsed.stop, parsed.sampling.min_tokens)

        try:
            submit()
            async for event in stream:
                match event:
                    case messages.Started():
                        if started is None:
                            started = event
                            yield common_pb2.GenerateEvent(accepted=self._accepted(request, parsed, event))
                    case messages.PromptScored():
                        scored += event.scored
                    case messages.Tokens():
                        if not echoed:
                            echoed = True
                            yield common_pb2.GenerateEvent(prompt=self._echo(parsed, scored))
                        # The other choices follow once the prompt's pages are there to be shared.
                        while len(answers) < parsed.num_choices:
                            submit()
                        answer = answers[event.key]
                        if not answer.stopped:
                            yield common_pb2.GenerateEvent(delta=answer.take(stream.take_tokens(event)))
                            if answer.stopped:
                                stream.cancel(event.key)
                    case messages.Ended():
                        answer = answers[event.key]
                        if not answer.stopped:
                            _raise_failure(event)
                        if (rest := answer.end(event)) is not None:
                            yield common_pb2.GenerateEvent(delta=rest)
            assert started is not None
            yield common_pb2.GenerateEvent(
                finished=_finished(parsed, started, list(answers.values()), arrived_s, request.gateway_queue_s)
            )
        finally:
            self._bridge.close(stream)

    async def WatchStatus(  # noqa: N802
        self, request: model_server_pb2.WatchStatusRequest, context: _Context
    ) -> AsyncIterator[model_server_pb2.ReplicaStatus]:
        seen, told_draining = self._bridge.status, self._draining.is_set()
        yield self._status(seen)
        while True:
            changed = asyncio.ensure_future(self._bridge.next_status(seen))
            waits: list[asyncio.Future[Any]] = [changed]
            if not told_draining:
                waits.append(asyncio.ensure_future(self._draining.wait()))
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            seen, told_draining = self._bridge.status, self._draining.is_set()
            yield self._status(seen)
            await asyncio.sleep(_STATUS_INTERVAL_S)

    async def PinAdapter(  # noqa: N802
        self, request: model_server_pb2.PinAdapterRequest, context: _Context
    ) -> model_server_pb2.PinAdapterResponse:
        ref = parse_adapter(request.adapter)
        self._check_open()
        failure = await self._bridge.pin(ref)
        if failure is not None:
            raise _error(failure)
        return model_server_pb2.PinAdapterResponse()

    async def UnpinAdapter(  # noqa: N802
        self, request: model_server_pb2.UnpinAdapterRequest, context: _Context
    ) -> model_server_pb2.UnpinAdapterResponse:
        self._bridge.unpin(parse_adapter(request.adapter))
        return model_server_pb2.UnpinAdapterResponse()

    def start_draining(self) -> None:
        """Refuse new requests; those in flight go on."""
        self._draining.set()

    async def drained(self, timeout_s: float) -> None:
        """Until no request is left, or the time is up."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._bridge.idle.wait(), timeout_s)

    def _check_open(self) -> None:
        if self._draining.is_set():
            raise errors.unavailable("this model server is draining", retry_after_s=1.0)

    def _accepted(
        self, request: model_server_pb2.ServerGenerateRequest, parsed: Parsed, started: messages.Started
    ) -> common_pb2.Accepted:
        return common_pb2.Accepted(
            request_id=request.request_id,
            adapter=request.adapter if request.HasField("adapter") else None,
            base_model=self._info.model_name,
            prompt_tokens=len(parsed.prompt_ids),
            cached_tokens=started.num_cached,
            queue_s=request.gateway_queue_s,
            replica=self._replica(),
        )

    def _echo(self, parsed: Parsed, scored: list[Sampled]) -> common_pb2.PromptEcho:
        return common_pb2.PromptEcho(
            token_ids=parsed.prompt_ids,
            text=self._tokenizer.decode(parsed.prompt_ids, skip_special=False) if parsed.echo else "",
            logprobs=[position_logprobs(s, s.logprob) for s in scored if s.logprob is not None],
        )

    def _status(self, status: messages.Status) -> model_server_pb2.ReplicaStatus:
        return model_server_pb2.ReplicaStatus(
            base_model=self._info.model_name,
            context_length=self._info.context_length,
            draining=self._draining.is_set(),
            running=status.running,
            waiting=status.waiting,
            parked=status.parked,
            free_pages=status.free_pages,
            num_pages=self._info.num_pages,
            page_size=self._info.page_size,
            resident_adapters=[_ref(ref) for ref in status.resident],
            free_rank_rows=status.free_rank_rows,
            num_rank_rows=min(self._info.num_rank_rows.values(), default=0),
            step=status.step,
            pinned_adapters=[_ref(ref) for ref in status.pinned],
            kv_bytes=self._info.kv_bytes,
            adapter_bytes=self._info.adapter_bytes,
        )


def _deadline_s(context: _Context, arrived_s: float) -> float | None:
    """When the engine is to be done, in monotonic time; None without a deadline."""
    remaining_s = context.time_remaining()
    if remaining_s is None:
        return None
    return arrived_s + remaining_s - min(_DEADLINE_MARGIN_S, remaining_s * _DEADLINE_MARGIN_SHARE)


def _finished(
    parsed: Parsed, started: messages.Started, answers: list[Answer], arrived_s: float, gateway_queue_s: float
) -> common_pb2.Finished:
    choices = [answer.choice_end() for answer in answers]
    finished = common_pb2.Finished(
        reason=choices[0].reason,
        choices=choices,
        usage=common_pb2.Usage(
            prompt_tokens=len(parsed.prompt_ids),
            cached_tokens=started.num_cached,
            output_tokens=sum(answer.num_output for answer in answers),
        ),
        timings=answers[0].timings(arrived_s, gateway_queue_s),
    )
    match choices[0].WhichOneof("matched"):
        case "stop":
            finished.stop = choices[0].stop
        case "stop_token_id":
            finished.stop_token_id = choices[0].stop_token_id
    return finished


def _raise_failure(ended: messages.Ended) -> None:
    """Raise what ended the request without an answer, if anything did."""
    if ended.failure is not None:
        raise _error(ended.failure)
    if ended.finish is Finish.DEADLINE:
        raise errors.deadline_exceeded(engine_spans.phase(ended))
    if ended.finish is Finish.CANCELLED:
        raise errors.ServiceError(grpc.StatusCode.CANCELLED, "the request was cancelled")


def _error(failure: messages.Failure) -> errors.ServiceError:
    if failure.status:
        return errors.from_status_bytes(failure.status)
    return errors.ServiceError(grpc.StatusCode[failure.code], failure.message)


def _ref(ref: AdapterRef) -> common_pb2.AdapterRef:
    return common_pb2.AdapterRef(adapter_id=ref.adapter_id, revision=ref.revision)
