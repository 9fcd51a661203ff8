"""Stop strings: whatever the chunks, nothing of a match is sent and nothing else is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_server.stop import StopChecker


def stream(stops: Sequence[str], chunks: Sequence[str], min_tokens: int = 0) -> tuple[list[str], str | None]:
    checker = StopChecker(stops, min_tokens)
    sent = [checker.push(chunk, number) for number, chunk in enumerate(chunks, 1)]
    return [*sent, checker.finish()], checker.matched


def test_nothing_of_a_stop_string_is_sent_before_it_completes() -> None:
    """TXT-11."""
    sent, matched = stream(["DEFGHIJ"], ["DEF", "G", "HI", "J"])
    assert "".join(sent) == "" and matched == "DEFGHIJ"


def test_nothing_after_the_match_is_sent() -> None:
    """TXT-13."""
    sent, matched = stream(["five"], ["four, ", "five, six", " seven"])
    assert sent == ["four, ", "", "", ""] and matched == "five"


def test_a_held_beginning_is_delivered_at_the_end() -> None:
    """TXT-15."""
    sent, matched = stream(["assistant"], ["ple", "as"])
    assert sent == ["ple", "", "as"] and matched is None


def test_a_failed_beginning_is_delivered_as_soon_as_it_fails() -> None:
    assert stream(["aab"], ["aa", "a", "c"])[0] == ["", "a", "aac", ""]


def test_the_first_to_complete_wins_and_the_longest_of_those() -> None:
    assert stream(["abcde", "cd"], ["xabcdef"]) == (["xab", ""], "cd")
    assert stream(["cd", "bcd"], ["xabcdef"]) == (["xa", ""], "bcd")


def test_min_tokens_counts_the_token_that_completes_the_match() -> None:
    assert stream(["b"], ["ab", "ab", "ab"], min_tokens=1) == (["ab", "a", "", ""], "b")
    # Begun within the first tokens, completed after them.
    assert stream(["ba"], ["ab", "ab"], min_tokens=1) == (["a", "", ""], "ba")


def test_no_stops_pass_everything() -> None:
    assert stream([], ["a", "b"]) == (["a", "b", ""], None)


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=5), max_size=12),
)
def test_chunking_does_not_matter(stops: list[str], chunks: list[str]) -> None:
    text = "".join(chunks)
    ends = {text.find(stop) + len(stop) for stop in stops if stop in text}
    sent, matched = stream(stops, chunks)
    if not ends:
        assert "".join(sent) == text and matched is None
        return
    end = min(ends)
    assert matched == max((stop for stop in stops if text[:end].endswith(stop)), key=len)
    assert "".join(sent) == text[: end - len(matched)]


@pytest.mark.parametrize("length", [20_000])
def test_cost_is_linear_in_the_text(length: int) -> None:
    # Quadratic work here would take minutes.
    sent, matched = stream(["a" * length + "b"], ["a" * 100] * (3 * length // 100))
    assert "".join(sent) == "a" * (3 * length) and matched is None
