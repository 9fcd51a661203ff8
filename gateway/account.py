"""What one request came to, as its span and the metrics tell it."""

from __future__ import annotations

import time
from collections import Counter
from types import TracebackType
from typing import Self

from opentelemetry import trace

from gateway.request import Request
from observability import spans
from observability.metrics import RequestMetrics
from protos import common_pb2, gateway_pb2
from protos.errors import ServiceError


class Account:
    """Opened when a request arrives, fed with its events, closed once as a context manager, by the error that ended it.
    Writes to the span current at its opening."""

    def __init__(self, metrics: RequestMetrics, streamed: bool) -> None:
        self.streamed = streamed
        self._metrics = metrics
        self._span = trace.get_current_span()
        self._span.set_attributes({spans.PROVIDER: spans.PROVIDER_NAME, spans.REQUEST_STREAM: streamed})
        self._started_s = time.monotonic()
        self._first_token_s: float | None = None
        self._operation = "text_completion"
        self._tenant = ""
        self._base_model = ""
        self._usage = common_pb2.Usage()
        self._choice_tokens: Counter[int] = Counter()  # by choice

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        match error:
            case None:
                self._close(None)
            case ServiceError():
                self._close(error.code.name)
            case Exception():
                self._close("INTERNAL")  # unforeseen, and what the caller is told
            case _:
                self._close("CANCELLED")

    @property
    def used_tokens(self) -> int:
        """What is known so far; a request that ends early has used what it was sent."""
        return self._usage.prompt_tokens + self._usage.output_tokens

    def admitted(self, request: Request, message: gateway_pb2.GenerateRequest) -> None:
        if message.prompt.HasField("chat"):
            self._operation = "chat"
        self._tenant = request.tenant
        adapter = message.target.adapter
        sampling = message.sampling
        attributes: dict[str, spans.AttributeValue] = {
            spans.OPERATION: self._operation,
            spans.REQUEST_ID: request.request_id,
            spans.RESPONSE_ID: request.request_id,
            spans.TENANT: request.tenant,
            spans.PRIORITY: request.priority.name.lower(),
        }
        if request.adapter is not None:
            version = adapter.revision or adapter.alias
            attributes[spans.REQUEST_MODEL] = spans.model_name("", adapter.adapter_id, version)
            attributes[spans.RESPONSE_MODEL] = spans.model_name("", *request.adapter)
            attributes[spans.ADAPTER_ID], attributes[spans.ADAPTER_REVISION] = request.adapter
        if sampling.HasField("max_tokens"):
            attributes[spans.REQUEST_MAX_TOKENS] = sampling.max_tokens
        if sampling.HasField("temperature"):
            attributes[spans.REQUEST_TEMPERATURE] = sampling.temperature
        if sampling.HasField("top_p"):
            attributes[spans.REQUEST_TOP_P] = sampling.top_p
        if sampling.HasField("top_k"):
            attributes[spans.REQUEST_TOP_K] = sampling.top_k
        if sampling.HasField("seed"):
            attributes[spans.REQUEST_SEED] = spans.signed(sampling.seed)
        self._span.set_attributes(attributes)

    def event(self, event: common_pb2.GenerateEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "delta":
            if self._first_token_s is None:
                self._first_token_s = time.monotonic() - self._started_s
            self._usage.output_tokens += len(event.delta.token_ids)
            self._choice_tokens[event.delta.choice] += len(event.delta.token_ids)
        elif kind == "accepted":
            self._usage.prompt_tokens = event.accepted.prompt_tokens
            self._base_model = event.accepted.base_model
            self._span.set_attributes(
                {spans.BASE_MODEL: event.accepted.base_model, spans.REPLICA: event.accepted.replica}
            )
            if not event.accepted.HasField("adapter"):
                self._span.set_attributes(
                    {spans.REQUEST_MODEL: self._base_model, spans.RESPONSE_MODEL: self._base_model}
                )
        elif kind == "finished":
            self._usage.CopyFrom(event.finished.usage)
            reason = common_pb2.FinishReason.Name(event.finished.reason).removeprefix("FINISH_REASON_").lower()
            self._span.set_attributes(
                {
                    spans.INPUT_TOKENS: self._usage.prompt_tokens,
                    spans.CACHED_TOKENS: self._usage.cached_tokens,
                    spans.OUTPUT_TOKENS: self._usage.output_tokens,
                    spans.FINISH_REASONS: [reason],
                    spans.PREEMPTIONS: event.finished.timings.preemptions,
                }
            )

    def _close(self, error: str | None) -> None:
        """`error` is the status code's name, None for success."""
        # By base model, not by adapter: thousands of adapters would make thousands of series of every histogram.
        attributes: spans.Attributes = {
            spans.OPERATION: self._operation,
            spans.PROVIDER: spans.PROVIDER_NAME,
            spans.REQUEST_MODEL: self._base_model,
            spans.TENANT: self._tenant,
        }
        self._metrics.finished(
            attributes,
            time.monotonic() - self._started_s,
            self._first_token_s,
            self._usage.prompt_tokens,
            self._usage.output_tokens,
            max(self._choice_tokens.values(), default=0),
            error,
        )
