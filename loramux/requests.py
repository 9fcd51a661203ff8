"""Python values into the messages of a request, shared by both clients. A value the wire cannot carry is refused here
with the same error, naming the same field, as the gateway would give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, cast

from protos import common_pb2, errors, gateway_pb2

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]]
Priority: TypeAlias = Literal["low", "normal", "high"]

_BYTES = (bytes, bytearray, memoryview)
_PRIORITIES = {
    "low": common_pb2.PRIORITY_LOW,
    "normal": common_pb2.PRIORITY_NORMAL,
    "high": common_pb2.PRIORITY_HIGH,
}


class Sampling(TypedDict, total=False):
    """What `generate` takes as keyword arguments; protos/common.proto (SamplingParams) says what each does. None
    stands for unset."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    min_tokens: int | None
    ignore_eos: bool | None
    logprobs: int | None
    n: int | None
    echo: bool | None
    prompt_logprobs: int | None


def generate_request(
    prompt: Prompt,
    *,
    adapter: str | None,
    revision: str | None,
    alias: str | None,
    priority: Priority,
    sampling: Sampling,
) -> gateway_pb2.GenerateRequest:
    """The wire form of one call. Raises ServiceError INVALID_ARGUMENT naming the field."""
    if priority not in _PRIORITIES:
        raise errors.invalid_argument("priority", f"{errors.quote(priority)} is none of low, normal, high")
    return gateway_pb2.GenerateRequest(
        target=_target(adapter, revision, alias),
        prompt=_prompt(prompt),
        sampling=_sampling(sampling),
        priority=_PRIORITIES[priority],
    )


def metadata(api_key: str | None, request_id: str | None) -> tuple[tuple[str, str], ...]:
    """Call metadata: the credential and the caller's own name for the request. Raises ServiceError INVALID_ARGUMENT."""
    for field, value in (("api_key", api_key), ("request_id", request_id)):
        if value is not None and not (value and value.isascii() and value.isprintable()):
            raise errors.invalid_argument(field, "must be printable ASCII, and not empty")
    pairs = []
    if api_key is not None:
        pairs.append(("authorization", f"Bearer {api_key}"))
    if request_id is not None:
        pairs.append(("x-request-id", request_id))
    return tuple(pairs)


def _target(adapter: str | None, revision: str | None, alias: str | None) -> common_pb2.Target:
    if revision is not None and alias is not None:
        raise errors.invalid_argument("target.adapter.version", "give a revision or an alias, not both")
    if adapter is None:
        if revision is not None or alias is not None:
            raise errors.invalid_argument("target.adapter.adapter_id", "a revision or alias needs an adapter")
        return common_pb2.Target(base=common_pb2.Target.Base())
    named = common_pb2.Target.Adapter(adapter_id=adapter)
    # An empty string is passed on as given: the gateway refuses it, where unset would mean the newest revision.
    if revision is not None:
        named.revision = revision
    if alias is not None:
        named.alias = alias
    return common_pb2.Target(adapter=named)


def _prompt(prompt: Prompt) -> common_pb2.Prompt:
    if isinstance(prompt, str):
        return common_pb2.Prompt(text=_text("prompt.text", prompt))
    # Bytes would pass for token ids, each a small number.
    if not isinstance(prompt, Iterable) or isinstance(prompt, _BYTES):
        raise errors.invalid_argument("prompt", "must be text, token ids or chat messages")
    items = list(prompt)
    if items and isinstance(items[0], Mapping):
        return common_pb2.Prompt(chat=common_pb2.ChatMessages(messages=[_message(i, m) for i, m in enumerate(items)]))
    try:
        return common_pb2.Prompt(token_ids=common_pb2.TokenIds(ids=cast(list[int], items)))
    except (TypeError, ValueError) as error:
        raise errors.invalid_argument("prompt.token_ids", str(error)) from error


def _message(index: int, message: object) -> common_pb2.ChatMessage:
    field = f"prompt.chat.messages[{index}]"
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise errors.invalid_argument(field, "must have exactly the keys role and content")
    role, content = message["role"], message["content"]
    if not isinstance(role, str) or not isinstance(content, str):
        raise errors.invalid_argument(field, "role and content must be text")
    return common_pb2.ChatMessage(role=_text(f"{field}.role", role), content=_text(f"{field}.content", content))


def _text(field: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise errors.invalid_argument(field, f"is not valid Unicode: {error.reason}") from error
    return text


def _sampling(sampling: Sampling) -> common_pb2.SamplingParams:
    params = common_pb2.SamplingParams()
    for name, value in sampling.items():
        if name not in Sampling.__annotations__:
            raise errors.invalid_argument(f"sampling.{name}", "no such parameter")
        if value is None:
            continue
        if isinstance(value, _BYTES):
            raise errors.invalid_argument(f"sampling.{name}", "must not be bytes")
        if name == "stop" and isinstance(value, str):
            value = [value]
        try:
            params.MergeFrom(common_pb2.SamplingParams(**cast(dict[str, Any], {name: value})))
        except (TypeError, ValueError, OverflowError) as error:
            raise errors.invalid_argument(f"sampling.{name}", str(error)) from error
    return params
