"""JSON log lines on stderr, each with its trace, span and request; the standard library's logs go the same way."""

from __future__ import annotations

import logging
import sys

import structlog
from opentelemetry import trace
from structlog.typing import EventDict, Processor, WrappedLogger


def configure(service_name: str, level: str = "INFO") -> None:
    """Route structlog and `logging` to stderr. Raises ValueError for an unknown level."""

    def add_context(logger: WrappedLogger, method_name: str, event: EventDict) -> EventDict:
        event["service"] = service_name
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            event["trace_id"] = trace.format_trace_id(span.trace_id)
            event["span_id"] = trace.format_span_id(span.span_id)
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_context,
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(ensure_ascii=False),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def get(name: str) -> structlog.stdlib.BoundLogger:
    """A logger: `log.info("event", key=value)`."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def bind_request(request_id: str) -> None:
    """Every log line of the current task and of the tasks it starts carries `request_id` from now on."""
    structlog.contextvars.bind_contextvars(request_id=request_id)


def request_id() -> str:
    """The request bound to the current task, or ""."""
    return str(structlog.contextvars.get_contextvars().get("request_id", ""))
