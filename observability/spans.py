"""Spans by hand, context over gRPC metadata, and the names of every attribute.

A span here never becomes current around a `yield`: a generator may be closed in another task than the one that entered
it, and resetting a context there fails. Spans are started, attributes set, and ended once, explicitly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]
Metadata = Iterable[tuple[str, str | bytes]]

# GenAI semantic conventions. An adapter stands in the model attributes as `adapter_id[@revision]`.
OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_STREAM: Final = "gen_ai.request.stream"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
REQUEST_TOP_K: Final = "gen_ai.request.top_k"
REQUEST_SEED: Final = "gen_ai.request.seed"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"

# RPC conventions.
RPC_SYSTEM: Final = "rpc.system.name"
RPC_METHOD: Final = "rpc.method"
RPC_STATUS: Final = "rpc.response.status_code"
ERROR_TYPE: Final = "error.type"

# What the conventions do not cover.
REQUEST_ID: Final = "loramux.request.id"
TENANT: Final = "loramux.tenant"
PRIORITY: Final = "loramux.priority"
ADAPTER_ID: Final = "loramux.adapter.id"
ADAPTER_REVISION: Final = "loramux.adapter.revision"
BASE_MODEL: Final = "loramux.base_model"
REPLICA: Final = "loramux.replica"
ATTEMPT: Final = "loramux.attempt"
PREEMPTIONS: Final = "loramux.preemptions"

PROVIDER_NAME: Final = "loramux"

_W3C = TraceContextTextMapPropagator()
_SCOPE = "loramux"


def model_name(base_model: str, adapter_id: str = "", revision: str = "") -> str:
    """What the model attributes say: the base model, or `adapter_id[@revision]`."""
    if not adapter_id:
        return base_model
    return f"{adapter_id}@{revision}" if revision else adapter_id


def signed(value: int) -> int:
    """An unsigned 64-bit `value` as an attribute can carry it, which is signed: without its highest bit."""
    return value & (2**63 - 1)


def start(
    name: str,
    kind: SpanKind = SpanKind.INTERNAL,
    parent: Context | SpanContext | None = None,
    attributes: Attributes | None = None,
    start_ns: int | None = None,
) -> Span:
    """A span to be ended by the caller; `parent` None means the span that is current now."""
    return trace.get_tracer(_SCOPE).start_span(
        name,
        context=_context(parent),
        kind=kind,
        attributes=attributes,
        start_time=start_ns,
        record_exception=False,
        set_status_on_exception=False,
    )


def record(
    name: str,
    parent: Context | SpanContext | None,
    start_ns: int,
    end_ns: int,
    attributes: Attributes | None = None,
    error: str | None = None,
) -> SpanContext:
    """A span after the fact, from wall-clock times in ns since the epoch; `error` is its error.type.

    For work in a process or thread that knows no telemetry and only reports when things happened.
    """
    span = start(name, parent=parent, attributes=attributes, start_ns=start_ns)
    end(span, error, end_ns=max(start_ns, end_ns))
    return span.get_span_context()


def end(span: Span, error: str | None = None, end_ns: int | None = None) -> None:
    """End `span`, failed with error.type `error` where given."""
    if error is not None:
        span.set_attribute(ERROR_TYPE, error)
        span.set_status(Status(StatusCode.ERROR, error))
    span.end(end_ns)


def inject(metadata: Metadata | None = None, context: Context | None = None) -> tuple[tuple[str, str | bytes], ...]:
    """`metadata` with the W3C trace context of `context` (None: the current one) in place of any it had."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, context)
    kept = (pair for pair in metadata or () if pair[0] not in _W3C.fields)
    return (*kept, *carrier.items())


def extract(metadata: Metadata | None) -> Context:
    """The remote parent that `metadata` names; without one, an empty context (a new trace)."""
    carrier = {key: value for key, value in metadata or () if isinstance(value, str)}
    return _W3C.extract(carrier, Context())


def _context(parent: Context | SpanContext | None) -> Context | None:
    if isinstance(parent, SpanContext):
        return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())
    return parent
