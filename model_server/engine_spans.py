"""The engine's part of a trace. The engine process knows no telemetry: it reports when things happened, and the serving
process records the spans afterwards, under the span of the RPC that carried the request."""

from __future__ import annotations

import time

from opentelemetry.trace import SpanContext

from model_server import messages
from model_server.request import Finish
from observability import spans

_ERRORS = {Finish.CANCELLED: "CANCELLED", Finish.DEADLINE: "DEADLINE_EXCEEDED", Finish.FAILED: "FAILED"}


def phase(ended: messages.Ended) -> str:
    """Where a request was when it ended."""
    if ended.first_token_s is not None:
        return "decode"
    if ended.first_scheduled_s is not None:
        return "prefill"
    return "adapter_load" if ended.parked else "queue"


def record(ended: messages.Ended, parent: SpanContext, arrived_s: float) -> None:
    """Spans engine.adapter_load, engine.queue, engine.prefill and engine.decode, as far as the request got.

    The span of the phase in which it ended otherwise than by itself carries the error.
    """
    offset_ns = time.time_ns() - time.monotonic_ns()
    now_s = time.monotonic()
    last = phase(ended)

    def span(name: str, start_s: float, end_s: float | None, attributes: spans.Attributes | None = None) -> None:
        error = _ERRORS.get(ended.finish) if name == last else None
        start_ns, end_ns = (int(t * 1e9) + offset_ns for t in (start_s, now_s if end_s is None else end_s))
        spans.record(f"engine.{name}", parent, start_ns, end_ns, attributes, error)

    queued_s = arrived_s
    if ended.parked_s is not None:
        queued_s = ended.parked_s + ended.adapter_load_s
        span("adapter_load", ended.parked_s, queued_s)
    if last != "adapter_load":
        span("queue", queued_s, ended.first_scheduled_s)
    if ended.first_scheduled_s is not None:
        span("prefill", ended.first_scheduled_s, ended.first_token_s, {spans.CACHED_TOKENS: ended.num_cached})
    if ended.first_token_s is not None:
        span(
            "decode",
            ended.first_token_s,
            ended.last_token_s,
            {spans.OUTPUT_TOKENS: ended.num_output, spans.PREEMPTIONS: ended.num_preemptions},
        )
