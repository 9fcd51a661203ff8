"""The ModelServer service: proto ↔ domain. Text work happens here (tokenise, detokenise, stop strings), on the way of each
request's own stream; the engine sees token ids only."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
from opentelemetry import trace

from model_server import engine_spans, messages
from model_server.bridge import Bridge
from model_server.detokenizer import IncrementalDetokenizer
from model_server.intake import Intake, Parsed
from model_server.request import AdapterRef, Finish
from model_server.runner import RunnerInfo, Sampled
from model_server.stop import StopChecker
from model_server.tokenizer import Tokenizer
from protos import common_pb2, errors, model_server_pb2
from protos.model_server_pb2_grpc import ModelServerServicer

_STATUS_INTERVAL_S = 0.1
_REASONS = {
    Finish.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    Finish.STOP: common_pb2.FINISH_REASON_STOP,
    Finish.EOS: common_pb2.FINISH_REASON_EOS,
}

_Context = grpc.aio.ServicerContext[Any, Any]


class Servicer(ModelServerServicer):
    def __init__(
        self,
        bridge: Bridge,
        intake: Intake,
        tokenizer: Tokenizer,
        info: RunnerInfo,
        replica: Callable[[], str],
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
        remaining_s = context.time_remaining()
        if self._draining.is_set():
            raise errors.unavailable("this model server is draining", retry_after_s=1.0)
        parsed = await self._intake.parse(request)
        answer = _Answer(self._tokenizer, parsed, arrived_s, request.gateway_queue_s)
        server_span = trace.get_current_span().get_span_context()
        stream = self._bridge.submit(
            request_id=request.request_id,
            prompt_ids=parsed.prompt_ids,
            sampling=parsed.sampling,
            adapter=parsed.adapter,
            priority=parsed.priority,
            tenant=request.tenant,
            arrived_s=arrived_s,
            deadline_s=None if remaining_s is None else arrived_s + remaining_s,
            on_end=lambda ended: engine_spans.record(ended, server_span, arrived_s, answer.num_cached),
        )
        try:
            async for event in stream:
                match event:
                    case messages.Started(_, num_cached):
                        answer.num_cached = num_cached
                        yield common_pb2.GenerateEvent(accepted=self._accepted(request, parsed, event))
                    case messages.Tokens() if not answer.stopped:
                        yield common_pb2.GenerateEvent(delta=answer.take(stream.take_tokens(event)))
                        if answer.stopped:
                            stream.cancel()
                    case messages.Ended():
                        if not answer.stopped:
                            _raise_failure(event)
                            if (rest := answer.rest()) is not None:
                                yield common_pb2.GenerateEvent(delta=rest)
                        yield common_pb2.GenerateEvent(finished=answer.finished(event))
        finally:
            stream.cancel()

    async def WatchStatus(  # noqa: N802
        self, request: model_server_pb2.WatchStatusRequest, context: _Context
    ) -> AsyncIterator[model_server_pb2.ReplicaStatus]:
        seen, told_draining = self._bridge.status, self._draining.is_set()
        yield self._status(seen)
        while True:
            changed = asyncio.ensure_future(self._bridge.next_status(seen))
            waits = [changed] if told_draining else [changed, asyncio.ensure_future(self._draining.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            seen, told_draining = self._bridge.status, self._draining.is_set()
            yield self._status(seen)
            await asyncio.sleep(_STATUS_INTERVAL_S)

    def start_draining(self) -> None:
        """Refuse new requests; those in flight go on."""
        self._draining.set()

    async def drained(self, timeout_s: float) -> None:
        """Until no request is left, or the time is up."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._bridge.idle.wait(), timeout_s)

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
        )


class _Answer:
    """One request's output on its way out: text, stop strings, counts and times."""

    def __init__(self, tokenizer: Tokenizer, parsed: Parsed, arrived_s: float, gateway_queue_s: float) -> None:
        self.prompt_tokens = len(parsed.prompt_ids)
        self.num_cached = 0
        self._arrived_s = arrived_s
        self._gateway_queue_s = gateway_queue_s
        self._first_delta_s: float | None = None
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop = StopChecker(parsed.stop, parsed.sampling.min_tokens)
        self._num_output = 0

    @property
    def stopped(self) -> bool:
        return self._stop.matched is not None

    def take(self, tokens: messages.Tokens) -> common_pb2.Delta:
        if self._first_delta_s is None:
            self._first_delta_s = time.monotonic()
        delta = common_pb2.Delta(index=self._num_output)
        text = []
        for sampled in tokens.sampled:
            self._num_output += 1
            delta.token_ids.append(sampled.token_id)
            if sampled.logprob is not None:
                delta.logprobs.append(_logprobs(sampled, sampled.logprob))
            text.append(self._stop.push(self._detokenizer.push((sampled.token_id,)), self._num_output))
            if self.stopped:
                break  # tokens past the stop string were computed but are not part of the answer
        delta.text = "".join(text)
        return delta

    def rest(self) -> common_pb2.Delta | None:
        """What was held back and turns out to be text after all: part of a stop string, or of a character."""
        text = self._stop.push(self._detokenizer.finish(), self._num_output) + self._stop.finish()
        return common_pb2.Delta(index=self._num_output, text=text) if text else None

    def finished(self, ended: messages.Ended) -> common_pb2.Finished:
        finished = common_pb2.Finished(
            usage=common_pb2.Usage(
                prompt_tokens=self.prompt_tokens, cached_tokens=self.num_cached, output_tokens=self._num_output
            ),
            timings=self._timings(ended),
        )
        if self._stop.matched is not None:
            finished.reason = common_pb2.FINISH_REASON_STOP
            finished.stop = self._stop.matched
        else:
            finished.reason = _REASONS[ended.finish]
            if ended.stop_token_id is not None:
                finished.stop_token_id = ended.stop_token_id
        return finished

    def _timings(self, ended: messages.Ended) -> common_pb2.Timings:
        # An answer has been scheduled and has a first token, or it would have failed before.
        assert ended.first_scheduled_s is not None
        assert ended.first_token_s is not None
        assert ended.last_token_s is not None
        assert self._first_delta_s is not None
        return common_pb2.Timings(
            gateway_queue_s=self._gateway_queue_s,
            engine_queue_s=ended.first_scheduled_s - self._arrived_s - ended.adapter_load_s,
            adapter_load_s=ended.adapter_load_s,
            prefill_s=ended.first_token_s - ended.first_scheduled_s,
            decode_s=ended.last_token_s - ended.first_token_s,
            time_to_first_token_s=self._first_delta_s - self._arrived_s,
            preemptions=ended.num_preemptions,
        )


def _raise_failure(ended: messages.Ended) -> None:
    """Raise what ended the request without an answer, if anything did."""
    failure = ended.failure
    if failure is not None:
        if failure.status:
            raise errors.from_status_bytes(failure.status)
        raise errors.ServiceError(grpc.StatusCode[failure.code], failure.message)
    if ended.finish is Finish.DEADLINE:
        raise errors.deadline_exceeded(engine_spans.phase(ended))
    if ended.finish is Finish.CANCELLED:
        raise errors.ServiceError(grpc.StatusCode.CANCELLED, "the request was cancelled")


def _logprobs(sampled: Sampled, logprob: float) -> common_pb2.PositionLogprobs:
    top = [common_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in sampled.top]
    return common_pb2.PositionLogprobs(logprob=logprob, top=top)


def _ref(ref: AdapterRef) -> common_pb2.AdapterRef:
    return common_pb2.AdapterRef(adapter_id=ref.adapter_id, revision=ref.revision)
