"""What the blocking and the asyncio stream have in common: all but the iteration."""

from __future__ import annotations

from typing import Any

import grpc

from loramux.chat_span import ChatSpan
from loramux.transcript import Choice, Transcript
from protos import common_pb2, errors


class BaseStream:
    """One generation under way: its call, its span, and what it has said so far."""

    def __init__(self, call: Any, span: ChatSpan) -> None:
        self._call = call
        self._span = span
        self._transcript = Transcript()

    @property
    def accepted(self) -> common_pb2.Accepted | None:
        """What the request was resolved to; None until the first message has been read."""
        return self._transcript.accepted

    @property
    def finished(self) -> common_pb2.Finished | None:
        """Reason, usage and timings; None until the whole stream has been read."""
        return self._transcript.finished

    @property
    def choices(self) -> list[Choice]:
        """The answers read so far, `n` of them in the end."""
        return self._transcript.choices

    @property
    def text(self) -> str:
        """The first answer's text read so far."""
        return self._transcript.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first answer's token ids read so far."""
        return self._transcript.choices[0].token_ids

    @property
    def prompt(self) -> common_pb2.PromptEcho | None:
        """The prompt, where `echo` or `prompt_logprobs` asked for it."""
        return self._transcript.prompt

    def cancel(self) -> None:
        """Stop the generation, everywhere. Does nothing once it has ended."""
        self._call.cancel()
        self._span.end(self._transcript, None if self.finished else grpc.StatusCode.CANCELLED.name)

    def _failed(self, error: errors.ServiceError) -> errors.ServiceError:
        self._span.end(self._transcript, error.code.name)
        return error
