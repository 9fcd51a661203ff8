"""Range checks of what a caller sends, as the comments of common.proto state them.

The gateway refuses here before a request queues, the model server for those that call it directly. What needs a
tokenizer or the model (vocabulary, context length) only the model server can check.
"""

from __future__ import annotations

import math

from protos import adapter_format
from protos import common_pb2 as pb
from protos.errors import invalid_argument, quote

MAX_PROMPT_BYTES = 1024 * 1024
MAX_MESSAGES = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_CHOICES = 16
ROLES = ("system", "user", "assistant")


def check_prompt(prompt: pb.Prompt) -> None:
    """Raises INVALID_ARGUMENT naming `prompt` or the part of it at fault."""
    kind = prompt.WhichOneof("kind")
    if kind is None:
        raise invalid_argument("prompt", "set one of text, token_ids or chat")
    if kind == "text":
        if not prompt.text:
            raise invalid_argument("prompt.text", "is empty")
        _check_size("prompt.text", len(prompt.text.encode()))
    elif kind == "token_ids":
        if not prompt.token_ids.ids:
            raise invalid_argument("prompt.token_ids", "is empty")
    else:
        if not prompt.chat.messages:
            raise invalid_argument("prompt.chat", "has no messages")
        if len(prompt.chat.messages) > MAX_MESSAGES:
            raise invalid_argument("prompt.chat", f"has {len(prompt.chat.messages)} messages, at most {MAX_MESSAGES}")
        _check_size("prompt.chat", prompt.chat.ByteSize())
        for index, message in enumerate(prompt.chat.messages):
            if message.role not in ROLES:
                raise invalid_argument(
                    f"prompt.chat.messages[{index}].role", f"is {quote(message.role)}, not one of {', '.join(ROLES)}"
                )


def check_sampling(sampling: pb.SamplingParams) -> None:
    """Raises INVALID_ARGUMENT naming the first field out of its range."""
    if sampling.HasField("max_tokens") and sampling.max_tokens < 1:
        raise invalid_argument("sampling.max_tokens", f"is {sampling.max_tokens}, must be at least 1")
    if sampling.HasField("temperature"):
        _check_range("temperature", sampling.temperature, low=0.0)
    if sampling.HasField("top_p"):
        _check_range("top_p", sampling.top_p, above=0.0, high=1.0)
    if sampling.top_k < 0:
        raise invalid_argument("sampling.top_k", f"is {sampling.top_k}, must not be negative")
    if sampling.HasField("min_p"):
        _check_range("min_p", sampling.min_p, low=0.0, high=1.0)
    if sampling.HasField("repetition_penalty"):
        _check_range("repetition_penalty", sampling.repetition_penalty, above=0.0)
    if sampling.HasField("presence_penalty"):
        _check_range("presence_penalty", sampling.presence_penalty, low=-2.0, high=2.0)
    if sampling.HasField("frequency_penalty"):
        _check_range("frequency_penalty", sampling.frequency_penalty, low=-2.0, high=2.0)
    _check_count("logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIASES)
    for token_id, bias in sampling.logit_bias.items():
        _check_range(f"logit_bias[{token_id}]", bias, low=-100.0, high=100.0)
    _check_count("stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKEN_IDS)
    _check_count("stop", len(sampling.stop), MAX_STOP_STRINGS)
    for index, stop in enumerate(sampling.stop):
        if not stop:
            raise invalid_argument(f"sampling.stop[{index}]", "is empty")
    if sampling.min_tokens < 0:
        raise invalid_argument("sampling.min_tokens", f"is {sampling.min_tokens}, must not be negative")
    if sampling.HasField("max_tokens") and sampling.min_tokens > sampling.max_tokens:
        raise invalid_argument(
            "sampling.min_tokens", f"is {sampling.min_tokens}, more than max_tokens {sampling.max_tokens}"
        )
    for name in ("logprobs", "prompt_logprobs"):
        number = getattr(sampling, name)
        if sampling.HasField(name) and not 0 <= number <= MAX_LOGPROBS:
            raise invalid_argument(f"sampling.{name}", f"is {number}, must be 0 to {MAX_LOGPROBS}")
    if sampling.HasField("n") and not 1 <= sampling.n <= MAX_CHOICES:
        raise invalid_argument("sampling.n", f"is {sampling.n}, must be 1 to {MAX_CHOICES}")


def check_adapter(ref: pb.AdapterRef, field: str = "adapter") -> None:
    """Raises INVALID_ARGUMENT naming the part of `field` that names no revision of an adapter."""
    adapter_format.check_adapter_id(ref.adapter_id, f"{field}.adapter_id")
    adapter_format.check_revision(ref.revision, f"{field}.revision")


def check_priority(priority: int) -> None:
    """Raises INVALID_ARGUMENT for a number that is no Priority (proto3 enums are open)."""
    if priority not in pb.Priority.values():
        raise invalid_argument("priority", f"is {priority}, not a known priority")


def _check_range(
    name: str, value: float, *, low: float = -math.inf, high: float = math.inf, above: float = -math.inf
) -> None:
    """`low` and `high` are included, `above` is not; NaN and infinities are in no range."""
    if math.isfinite(value) and low <= value <= high and value > above:
        return
    bounds = [
        *([f"at least {low:g}"] if low > -math.inf else []),
        *([f"greater than {above:g}"] if above > -math.inf else []),
        *([f"at most {high:g}"] if high < math.inf else []),
    ]
    raise invalid_argument(f"sampling.{name}", f"is {value:g}, must be finite and {' and '.join(bounds)}")


def _check_count(name: str, number: int, limit: int) -> None:
    if number > limit:
        raise invalid_argument(f"sampling.{name}", f"has {number} entries, at most {limit}")


def _check_size(field: str, num_bytes: int) -> None:
    if num_bytes > MAX_PROMPT_BYTES:
        raise invalid_argument(field, f"has {num_bytes} bytes, at most {MAX_PROMPT_BYTES}")
