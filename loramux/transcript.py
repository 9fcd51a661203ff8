"""What one stream has said so far, held to its contract: Accepted, Deltas in order, one Finished."""

from __future__ import annotations

from dataclasses import dataclass, field

from protos import common_pb2, errors


@dataclass(slots=True)
class Choice:
    """One of a request's answers, as far as it has come."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)


class Transcript:
    """`accepted`, `prompt` and `finished` are None until their message has come; `choices` grow with the deltas."""

    def __init__(self) -> None:
        self.accepted: common_pb2.Accepted | None = None
        self.prompt: common_pb2.PromptEcho | None = None
        self.finished: common_pb2.Finished | None = None
        self.choices = [Choice()]

    def receive(self, event: common_pb2.GenerateEvent) -> common_pb2.Delta | None:
        """Take the next message; returns it if it is a delta. Raises ServiceError INTERNAL where it is out of order."""
        kind = event.WhichOneof("event")
        if self.finished is not None:
            raise errors.internal(f"broken stream: {kind} after finished")
        if (kind == "accepted") == (self.accepted is not None):
            raise errors.internal(f"broken stream: {kind} {'again' if self.accepted else 'before accepted'}")
        if kind == "accepted":
            self.accepted = event.accepted
        elif kind == "finished":
            self.finished = event.finished
        elif kind == "delta":
            return self._extend(event.delta)
        elif kind == "prompt":
            self.prompt = event.prompt
        else:
            raise errors.internal("broken stream: an empty event")
        return None

    def end(self) -> None:
        """The stream ended with status OK. Raises ServiceError INTERNAL unless it was complete."""
        if self.finished is None:
            raise errors.internal("the stream ended without Finished")

    def _extend(self, delta: common_pb2.Delta) -> common_pb2.Delta:
        while delta.choice >= len(self.choices):
            self.choices.append(Choice())
        choice = self.choices[delta.choice]
        if delta.index != len(choice.token_ids):
            raise errors.internal(f"broken stream: token {delta.index} where {len(choice.token_ids)} was due")
        choice.token_ids.extend(delta.token_ids)
        choice.logprobs.extend(delta.logprobs)
        choice.parts.append(delta.text)
        return delta
