"""The caller's span of one generation: from the call to its end, above the RPC's own span."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import SpanKind

from loramux.transcript import Transcript
from observability import spans
from protos import common_pb2, gateway_pb2

_OPERATION = "chat"
# Request parameters that the conventions name, by their field in SamplingParams.
_PARAMETERS = {
    "max_tokens": spans.REQUEST_MAX_TOKENS,
    "temperature": spans.REQUEST_TEMPERATURE,
    "top_p": spans.REQUEST_TOP_P,
    "top_k": spans.REQUEST_TOP_K,
}


class ChatSpan:
    """Named "chat <adapter>", or "chat" for the base model, whose name the caller does not know."""

    def __init__(self, request: gateway_pb2.GenerateRequest) -> None:
        adapter = request.target.adapter
        attributes: dict[str, spans.AttributeValue] = {
            spans.OPERATION: _OPERATION,
            spans.PROVIDER: spans.PROVIDER_NAME,
            spans.REQUEST_STREAM: True,
        }
        if adapter.adapter_id:
            version = adapter.revision or adapter.alias
            attributes[spans.REQUEST_MODEL] = spans.model_name("", adapter.adapter_id, version)
        for field, name in _PARAMETERS.items():
            if request.sampling.HasField(field):  # type: ignore[arg-type]
                attributes[name] = getattr(request.sampling, field)
        if request.sampling.HasField("seed"):
            attributes[spans.REQUEST_SEED] = spans.signed(request.sampling.seed)
        self._span = spans.start(f"{_OPERATION} {adapter.adapter_id}".rstrip(), SpanKind.CLIENT, None, attributes)

    def current(self) -> AbstractContextManager[Any]:
        """Make it the parent of what is started inside, for the moment of issuing the call only."""
        return trace.use_span(self._span, end_on_exit=False, record_exception=False, set_status_on_exception=False)

    def end(self, transcript: Transcript, error: str | None) -> None:
        """Say what came of it; `error` is a status code's name. Later calls do nothing."""
        if not self._span.is_recording():
            return
        if (accepted := transcript.accepted) is not None:
            ref = accepted.adapter
            self._span.set_attributes(
                {
                    spans.REQUEST_ID: accepted.request_id,
                    spans.RESPONSE_MODEL: spans.model_name(accepted.base_model, ref.adapter_id, ref.revision),
                    spans.REPLICA: accepted.replica,
                }
            )
        if (finished := transcript.finished) is not None:
            reason = common_pb2.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()
            self._span.set_attributes(
                {
                    spans.FINISH_REASONS: (reason,),
                    spans.INPUT_TOKENS: finished.usage.prompt_tokens,
                    spans.CACHED_TOKENS: finished.usage.cached_tokens,
                    spans.OUTPUT_TOKENS: finished.usage.output_tokens,
                }
            )
        spans.end(self._span, error)
