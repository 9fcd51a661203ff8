"""Stop strings over streamed text: nothing of a match is sent, nothing else is lost, and chunking does not matter."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """One stream. Text ends before the stop string that is complete first (the longest, if several end together).

    Each stop string is followed by its own automaton (Knuth–Morris–Pratt), so the cost is linear in the text whatever
    the strings, and the longest automaton's state is exactly the text that must be withheld.
    """

    def __init__(self, stops: Sequence[str], min_tokens: int = 0) -> None:
        """`stops`: none empty. A match that completes within the first `min_tokens` tokens does not count."""
        self._stops = tuple(stops)
        self._min_tokens = min_tokens
        self._failures = tuple(_failure(stop) for stop in self._stops)
        self._states = [0] * len(self._stops)
        self._first_characters = {stop[0] for stop in self._stops}
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, num_tokens: int) -> str:
        """The text that may be sent, given the next `text`, whose last token is the stream's `num_tokens`-th.

        After a match (`matched` is set) returns nothing more.
        """
        if self.matched is not None:
            return ""
        if not self._held and self._first_characters.isdisjoint(text):
            return text
        text = self._held + text
        may_match = num_tokens > self._min_tokens
        for end in range(len(self._held), len(text)):
            self._advance(text[end], may_match)
            if self.matched is not None:
                self._held = ""
                return text[: end + 1 - len(self.matched)]
        keep = len(text) - max(self._states)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """At the end of the stream: the withheld beginning of a stop string that never completed."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str, may_match: bool) -> None:
        for index, (stop, failure) in enumerate(zip(self._stops, self._failures, strict=True)):
            state = self._states[index]
            while state and stop[state] != character:
                state = failure[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                if may_match and (self.matched is None or len(stop) > len(self.matched)):
                    self.matched = stop
                state = failure[state - 1]
            self._states[index] = state


def _failure(stop: str) -> tuple[int, ...]:
    """failure[i]: the length of the longest proper prefix of stop[: i + 1] that is also its suffix."""
    lengths = [0]
    for character in stop[1:]:
        state = lengths[-1]
        while state and stop[state] != character:
            state = lengths[state - 1]
        lengths.append(state + (stop[state] == character))
    return tuple(lengths)
