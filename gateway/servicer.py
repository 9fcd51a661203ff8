"""The Generation service: what a call asks for in the gateway's own terms, and back. Nothing is decided here."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import grpc.aio

from gateway.account import Account
from gateway.catalog import Catalog
from gateway.dispatcher import Dispatcher
from gateway.forwarder import Forwarder
from gateway.replicas import Replicas
from gateway.request import AdapterRef, Priority, Request
from gateway.tenants import Tenants
from observability import logs
from observability.metrics import RequestMetrics
from protos import common_pb2, gateway_pb2, gateway_pb2_grpc, model_server_pb2
from protos.errors import deadline_exceeded, invalid_argument
from protos.serving import MAX_MESSAGE_BYTES
from protos.validation import check_priority, check_prompt, check_sampling

SERVICE_NAME = gateway_pb2.DESCRIPTOR.services_by_name["Generation"].full_name

_PRIORITIES = {
    common_pb2.PRIORITY_UNSPECIFIED: Priority.NORMAL,
    common_pb2.PRIORITY_LOW: Priority.LOW,
    common_pb2.PRIORITY_NORMAL: Priority.NORMAL,
    common_pb2.PRIORITY_HIGH: Priority.HIGH,
}
# What fairness expects of a request that does not say, until its Finished tells.
_EXPECTED_OUTPUT_TOKENS = 256
_BYTES_PER_TOKEN = 4
# GenerateUnary's answer is one message. What is not counted, and texts of long tokens, have the rest of it.
_MAX_ANSWER_BYTES = MAX_MESSAGE_BYTES - 256 * 1024
_BYTES_PER_LOGPROB = 12
_BYTES_PER_TOKEN_ID = 4
# A model server's default for max_tokens is its own affair; it is taken to be no more than this.
_MOST_DEFAULT_TOKENS = 4096
# Our deadline lies this much before the caller's, so that the typed error arrives before the call is cut; and gRPC rounds
# a time up on its way, so that of what we see the caller may have less.
_DEADLINE_MARGIN_S = 0.05
_DEADLINE_MARGIN_SHARE = 0.1
_ROUNDED_UP_SHARE = 0.01

_Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(gateway_pb2_grpc.GenerationServicer):
    def __init__(
        self,
        tenants: Tenants,
        catalog: Catalog,
        replicas: Replicas,
        dispatcher: Dispatcher,
        forwarder: Forwarder,
        metrics: RequestMetrics,
    ) -> None:
        self._tenants = tenants
        self._catalog = catalog
        self._replicas = replicas
        self._dispatcher = dispatcher
        self._forwarder = forwarder
        self._metrics = metrics

    async def Generate(  # noqa: N802
        self, request: gateway_pb2.GenerateRequest, context: Any
    ) -> AsyncGenerator[common_pb2.GenerateEvent, None]:
        with Account(self._metrics, streamed=True) as account:
            async with contextlib.aclosing(self._events(request, context, account)) as events:
                async for event in events:
                    yield event

    async def GenerateUnary(  # noqa: N802
        self, request: gateway_pb2.GenerateRequest, context: Any
    ) -> gateway_pb2.GenerateResponse:
        response = gateway_pb2.GenerateResponse()
        texts: list[list[str]] = []
        with Account(self._metrics, streamed=False) as account:
            async with contextlib.aclosing(self._events(request, context, account)) as events:
                async for event in events:
                    kind = event.WhichOneof("event")
                    if kind == "delta":
                        choice = response.choices[event.delta.choice]
                        texts[event.delta.choice].append(event.delta.text)
                        choice.token_ids.extend(event.delta.token_ids)
                        choice.logprobs.extend(event.delta.logprobs)
                    elif kind == "accepted":
                        response.accepted.CopyFrom(event.accepted)
                        # Not before: until here nobody may have checked how many are asked for.
                        for _ in range(max(1, request.sampling.n)):
                            response.choices.add()
                            texts.append([])
                    elif kind == "prompt":
                        response.prompt.CopyFrom(event.prompt)
                    else:
                        response.finished.CopyFrom(event.finished)
            for choice, parts in zip(response.choices, texts, strict=True):
                choice.text = "".join(parts)
        return response

    async def ListModels(  # noqa: N802
        self, request: gateway_pb2.ListModelsRequest, context: Any
    ) -> gateway_pb2.ListModelsResponse:
        self._tenants.authenticate(_pairs(context))
        response = gateway_pb2.ListModelsResponse()
        for adapter_id, adapter in self._catalog:
            response.adapters.add(
                adapter_id=adapter_id,
                newest_revision=adapter.newest,
                aliases=adapter.aliases,
                revisions=len(adapter.created),
            )
        response.context_length = self._replicas.context_length
        for replica in self._replicas:
            status = replica.status
            response.base_model = response.base_model or status.base_model
            response.replicas.add(
                address=replica.load.address,
                ready=replica.load.ready,
                base_model=status.base_model,
                outstanding=replica.load.outstanding,
                resident_adapters=status.resident_adapters,
            )
        return response

    async def _events(
        self, message: gateway_pb2.GenerateRequest, context: _Context, account: Account
    ) -> AsyncGenerator[common_pb2.GenerateEvent, None]:
        request, forwarded = self._accept(message, context, account.streamed)
        account.admitted(request, message)
        deadline_s = _deadline_s(context)
        try:
            async with contextlib.aclosing(self._forwarder.events(request, forwarded, deadline_s)) as events:
                async for event in events:
                    account.event(event)
                    yield event
        finally:
            self._dispatcher.settle(request, account.used_tokens)

    def _accept(
        self, message: gateway_pb2.GenerateRequest, context: _Context, streamed: bool
    ) -> tuple[Request, model_server_pb2.ServerGenerateRequest]:
        """Authenticate, validate, resolve."""
        tenant = self._tenants.authenticate(_pairs(context))
        check_prompt(message.prompt)
        check_sampling(message.sampling)
        check_priority(message.priority)
        if not streamed:
            _check_answer_size(message.prompt, message.sampling, self._replicas.context_length)
        adapter = self._resolve(message.target)
        request = Request(
            request_id=logs.request_id() or uuid.uuid4().hex,
            tenant=tenant,
            priority=_PRIORITIES[message.priority],
            adapter=adapter,
            cost=_expected_tokens(message),
        )
        forwarded = model_server_pb2.ServerGenerateRequest(
            request_id=request.request_id,
            prompt=message.prompt,
            sampling=message.sampling,
            priority=message.priority,
            tenant=tenant,
        )
        if adapter is not None:
            forwarded.adapter.adapter_id, forwarded.adapter.revision = adapter
        return request, forwarded

    def _resolve(self, target: common_pb2.Target) -> AdapterRef | None:
        kind = target.WhichOneof("kind")
        if kind is None:
            raise invalid_argument("target", "set base or adapter")
        if kind == "base":
            return None
        asked = target.adapter
        version = asked.WhichOneof("version")
        return self._catalog.resolve(
            asked.adapter_id,
            revision=asked.revision if version == "revision" else None,
            alias=asked.alias if version == "alias" else None,
        )


def _deadline_s(context: _Context) -> float | None:
    """When to be done, in monotonic time; None without a deadline. Raises DEADLINE_EXCEEDED if that has passed."""
    remaining_s = context.time_remaining()
    if remaining_s is None:
        return None
    if remaining_s <= 0:
        raise deadline_exceeded("queue")
    margin_s = min(_DEADLINE_MARGIN_S, remaining_s * _DEADLINE_MARGIN_SHARE) + remaining_s * _ROUNDED_UP_SHARE
    return time.monotonic() + remaining_s - margin_s


def _expected_tokens(message: gateway_pb2.GenerateRequest) -> int:
    prompt = message.prompt
    if prompt.HasField("token_ids"):
        prompt_tokens = len(prompt.token_ids.ids)
    else:
        prompt_tokens = prompt.ByteSize() // _BYTES_PER_TOKEN
    output_tokens = message.sampling.max_tokens or _EXPECTED_OUTPUT_TOKENS
    return max(1, prompt_tokens) + max(1, message.sampling.n) * output_tokens


def _check_answer_size(prompt: common_pb2.Prompt, sampling: common_pb2.SamplingParams, context_length: int) -> None:
    """INVALID_ARGUMENT where the answer may not fit into one message, naming what takes most of it; `context_length` 0 is
    unknown."""

    def within_context(tokens: int) -> int:
        return min(tokens, context_length or tokens)

    # A tokenizer makes no more tokens of a text than it has bytes.
    prompt_bytes = prompt.ByteSize()
    prompt_tokens = within_context(len(prompt.token_ids.ids) or prompt_bytes)
    output_tokens = max(1, sampling.n) * within_context(sampling.max_tokens or _MOST_DEFAULT_TOKENS)
    parts = {"sampling.max_tokens": output_tokens * (_BYTES_PER_TOKEN + _BYTES_PER_TOKEN_ID)}
    if sampling.HasField("logprobs"):
        parts["sampling.logprobs"] = output_tokens * (1 + sampling.logprobs) * _BYTES_PER_LOGPROB
    if sampling.HasField("prompt_logprobs"):
        parts["sampling.prompt_logprobs"] = prompt_tokens * (1 + sampling.prompt_logprobs) * _BYTES_PER_LOGPROB
    if sampling.echo:
        # Of text and ids it has one already.
        parts["sampling.echo"] = prompt_bytes + prompt_tokens * _BYTES_PER_TOKEN
    num_bytes = sum(parts.values())
    if num_bytes > _MAX_ANSWER_BYTES:
        raise invalid_argument(
            max(parts, key=lambda field: parts[field]),
            f"the answer may take {num_bytes} bytes, more than the {_MAX_ANSWER_BYTES} of one message; "
            "ask for less, or call Generate, which streams",
        )


def _pairs(context: _Context) -> list[tuple[str, str | bytes]]:
    return [(str(key), value) for key, value in context.invocation_metadata() or ()]
