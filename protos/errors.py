"""Typed errors: one exception class that carries a canonical code and google.rpc details across every hop.

Domain code raises what the constructors below make; `protos.serving.ErrorInterceptor` turns it into the RPC's status,
with the details in `grpc-status-details-bin`; `from_rpc_error` reads them back on the other side, unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "loramux"
# Metadata is limited to 8 KiB: what callers sent is quoted back at most this long.
_QUOTE_LIMIT = 200
_M = TypeVar("_M", bound=Message)

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class ServiceError(Exception):
    """A failure to report to the caller: `code`, a sentence, and typed `details`."""

    def __init__(self, code: grpc.StatusCode, message: str, details: Sequence[Message] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = tuple(details)

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"

    def __reduce__(self) -> tuple[object, ...]:
        return (from_status_bytes, (self.to_status().SerializeToString(),))

    def to_status(self) -> status_pb2.Status:
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        for detail in self.details:
            status.details.add().Pack(detail)
        return status

    def detail(self, kind: type[_M]) -> _M | None:
        """The first detail of `kind`, or None."""
        return next((d for d in self.details if isinstance(d, kind)), None)

    @property
    def field(self) -> str | None:
        """The request field an INVALID_ARGUMENT is about."""
        bad = self.detail(error_details_pb2.BadRequest)
        return bad.field_violations[0].field if bad and bad.field_violations else None


def quote(value: object) -> str:
    """`value` as it can stand in a message: its repr, cut to a length metadata can carry."""
    text = repr(value)
    return text if len(text) <= _QUOTE_LIMIT else text[: _QUOTE_LIMIT - 1] + "…"


def invalid_argument(field: str, description: str) -> ServiceError:
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        f"{field}: {description}",
        [error_details_pb2.BadRequest(field_violations=[violation])],
    )


def not_found(resource_type: str, resource_name: str, description: str) -> ServiceError:
    """`resource_type` is "adapter", "revision" or "alias"."""
    info = error_details_pb2.ResourceInfo(
        resource_type=resource_type, resource_name=resource_name[:_QUOTE_LIMIT], description=description
    )
    return ServiceError(grpc.StatusCode.NOT_FOUND, description, [info])


def failed_precondition(kind: str, subject: str, description: str) -> ServiceError:
    violation = error_details_pb2.PreconditionFailure.Violation(
        type=kind, subject=subject[:_QUOTE_LIMIT], description=description
    )
    return ServiceError(
        grpc.StatusCode.FAILED_PRECONDITION,
        description,
        [error_details_pb2.PreconditionFailure(violations=[violation])],
    )


def resource_exhausted(subject: str, description: str, retry_after_s: float | None = None) -> ServiceError:
    """A limit that stands in the way now; `subject` names it."""
    violation = error_details_pb2.QuotaFailure.Violation(subject=subject[:_QUOTE_LIMIT], description=description)
    details: list[Message] = [error_details_pb2.QuotaFailure(violations=[violation])]
    return ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, description, details + _retry(retry_after_s))


def unavailable(description: str, retry_after_s: float | None = None) -> ServiceError:
    return ServiceError(grpc.StatusCode.UNAVAILABLE, description, _retry(retry_after_s))


def deadline_exceeded(phase: str) -> ServiceError:
    """`phase` is where the request was: "queue", "adapter_load", "prefill" or "decode"."""
    info = error_details_pb2.ErrorInfo(reason="DEADLINE_EXCEEDED", domain=DOMAIN, metadata={"phase": phase})
    return ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, f"the deadline passed in phase {phase}", [info])


def unauthenticated(description: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.UNAUTHENTICATED, description)


def internal(description: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.INTERNAL, description)


def from_rpc_error(error: grpc.RpcError | grpc.aio.AioRpcError) -> ServiceError:
    """The error a server reported, with its details when it sent any."""
    code, message = error.code(), error.details() or ""
    # The stubs of the blocking API know its metadata only as an opaque type; it is pairs in both.
    trailing: Any = error.trailing_metadata()
    for key, value in trailing or ():
        if key == DETAILS_KEY:
            try:
                return from_status_bytes(value if isinstance(value, bytes) else value.encode())
            except Exception:  # a peer's malformed detail must not hide its status
                break
    return ServiceError(code, message)


async def abort(context: grpc.aio.ServicerContext[object, object], error: ServiceError) -> NoReturn:
    """End the RPC with `error`. Does not return."""
    metadata = ((DETAILS_KEY, error.to_status().SerializeToString()),)
    await context.abort(error.code, error.message, trailing_metadata=metadata)
    raise AssertionError("abort returned")


def _retry(after_s: float | None) -> list[Message]:
    if after_s is None:
        return []
    delay = Duration()
    delay.FromMilliseconds(int(after_s * 1000))
    return [error_details_pb2.RetryInfo(retry_delay=delay)]


_KINDS: tuple[type[Message], ...] = (
    error_details_pb2.BadRequest,
    error_details_pb2.ResourceInfo,
    error_details_pb2.PreconditionFailure,
    error_details_pb2.QuotaFailure,
    error_details_pb2.RetryInfo,
    error_details_pb2.ErrorInfo,
)


def from_status_bytes(data: bytes) -> ServiceError:
    """The error whose `to_status()` was serialized to `data`; details of unknown kinds are dropped."""
    status = status_pb2.Status.FromString(data)
    details: list[Message] = []
    for packed in status.details:
        for kind in _KINDS:
            if packed.Is(kind.DESCRIPTOR):
                message = kind()
                packed.Unpack(message)
                details.append(message)
    return ServiceError(_CODES[status.code], status.message, details)
