"""What one stream has said so far, held to its contract: Accepted, Deltas in order, one Finished."""

from __future__ import annotations

from protos import common_pb2, errors


class Transcript:
    """`accepted` and `finished` are None until their message has come; `text` and `token_ids` grow with the deltas."""

    def __init__(self) -> None:
        self.accepted: common_pb2.Accepted | None = None
        self.finished: common_pb2.Finished | None = None
        self.token_ids: list[int] = []
        self._text: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._text)

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
        else:
            raise errors.internal("broken stream: an empty event")
        return None

    def end(self) -> None:
        """The stream ended with status OK. Raises ServiceError INTERNAL unless it was complete."""
        if self.finished is None:
            raise errors.internal("the stream ended without Finished")

    def _extend(self, delta: common_pb2.Delta) -> common_pb2.Delta:
        if delta.index != len(self.token_ids):
            raise errors.internal(f"broken stream: token {delta.index} where {len(self.token_ids)} was due")
        self.token_ids.extend(delta.token_ids)
        self._text.append(delta.text)
        return delta
