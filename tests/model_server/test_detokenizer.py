"""Streamed text is the decode of all ids, exactly, for every kind of decoder and every cut."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from model_server.detokenizer import BYTE_OF, IncrementalDetokenizer
from model_server.tokenizer import Tokenizer
from tests.model_server.tokenizers_for_tests import byte_level, sentence_piece

EMOJI = ["访问", "ď", "🌶️", "👨‍👩‍👧‍👦", "🇫🇷", "e\u0301", "\U00010348"]


@pytest.fixture(params=["byte_level", "sentence_piece", "unstripped"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return byte_level() if request.param == "byte_level" else sentence_piece(request.param == "sentence_piece")


def deltas(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.finish()]


def byte_ids(backend: Backend, data: bytes) -> list[int]:
    """Ids that decode to `data`, one per byte."""
    if backend.token_to_id("<0x00>") is not None:
        return [backend.token_to_id(f"<0x{byte:02X}>") for byte in data]
    spelling = {byte: character for character, byte in BYTE_OF.items()}
    return [backend.token_to_id(spelling[byte]) for byte in data]


@pytest.mark.parametrize("text", EMOJI)
def test_characters_split_over_tokens_come_out_whole(backend: Backend, text: str) -> None:
    """TXT-01."""
    tokenizer = Tokenizer(backend, {})
    ids = byte_ids(backend, text.encode())
    assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids) == text


def test_no_character_is_sent_twice() -> None:
    """TXT-03."""
    backend = byte_level()
    tokenizer = Tokenizer(backend, {})
    ids = byte_ids(backend, "A 世ab".encode())
    assert deltas(tokenizer, ids) == ["A", " ", "", "", "世", "a", "b", ""]


def test_a_broken_character_becomes_a_replacement_where_the_full_decode_has_one(backend: Backend) -> None:
    """TXT-05."""
    tokenizer = Tokenizer(backend, {})
    for pending in (b"\xe4\xb8", b"\xf0\x9f\x8c", b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf0\x9f\x8c\xe4"):
        ids = byte_ids(backend, pending + b" b")
        assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids)
        ids = byte_ids(backend, b"a" + pending)
        assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids)


def test_leading_space_is_trimmed_once() -> None:
    """TXT-07, TXT-09: and the spaces between words stay."""
    backend = sentence_piece()
    tokenizer = Tokenizer(backend, {})
    for pieces, text in ((["▁", "▁leading"], " leading"), (["▁I", "▁am", "▁test", "ing"], "I am testing")):
        ids = [backend.token_to_id(piece) for piece in pieces]
        assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids) == text


def test_specials_and_ids_past_the_vocabulary_give_no_text(backend: Backend) -> None:
    """TXT-17."""
    tokenizer = Tokenizer(backend, {})
    ids = [backend.token_to_id("a"), backend.token_to_id("<s>"), tokenizer.vocab_size + 3, backend.token_to_id("b")]
    assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids) == "ab"
    assert tokenizer.decode([tokenizer.vocab_size + 3]) == ""


def test_random_ids_in_random_pushes_equal_the_full_decode(backend: Backend) -> None:
    tokenizer = Tokenizer(backend, {})
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(rng.randrange(40))]
        detokenizer = IncrementalDetokenizer(tokenizer)
        parts, start = [], 0
        while start < len(ids):
            size = rng.randrange(1, 5)
            parts.append(detokenizer.push(ids[start : start + size]))
            start += size
        assert "".join([*parts, detokenizer.finish()]) == tokenizer.decode(ids)


def test_a_decoder_that_is_not_supported_is_named() -> None:
    backend = byte_level()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        Tokenizer(backend, {})
