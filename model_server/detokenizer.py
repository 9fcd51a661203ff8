"""Token ids to text, incrementally: what a push returns is final, and all of it joined is the decode of all ids.

No window of tokens is decoded again: each token is turned into bytes once, by what the tokenizer's decoder says, and
only the bytes of an unfinished character are held. Two kinds of decoder cover the models served: byte-level BPE (each
token spells bytes) and SentencePiece's BPE with byte fallback (a token is text, or one byte).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

_METASPACE = "▁"


class TextState(Protocol):
    """One stream's decoding state."""

    def push(self, token: str) -> str: ...

    def finish(self) -> str: ...


class ByteLevelState:
    """Every token spells bytes in the byte-level alphabet; the whole is UTF-8, broken bytes become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> str:
        try:
            data = bytes(map(BYTE_OF.__getitem__, token))
        except KeyError:  # an added token, written as plain text
            data = token.encode()
        return self._decoder.decode(data)

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class ByteFallbackState:
    """A token is text with ▁ for a space, or one byte as <0xXX>.

    Neighbouring byte tokens are one run: the run is text if all of it is UTF-8, else each byte is U+FFFD. So a run is
    final only once it ends.
    """

    def __init__(self, strip_left: int, byte_fallback: bool) -> None:
        self._strip_left = strip_left
        self._byte_fallback = byte_fallback
        self._run = bytearray()

    def push(self, token: str) -> str:
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                self._run.append(int(token[3:5], 16))
                return ""
            except ValueError:
                pass
        return self._strip(self._take_run() + token.replace(_METASPACE, " "))

    def finish(self) -> str:
        return self._strip(self._take_run())

    def _take_run(self) -> str:
        if not self._run:
            return ""
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "�" * len(run)

    def _strip(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != " ":
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text


class TokenSource(Protocol):
    """What a stream needs of the tokenizer."""

    def text_state(self) -> TextState: ...

    def visible_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for a special token or an id past the vocabulary."""


class IncrementalDetokenizer:
    """One stream. Special tokens and ids the tokenizer does not know give no text."""

    def __init__(self, tokenizer: TokenSource) -> None:
        self._tokenizer = tokenizer
        self._state = tokenizer.text_state()

    def push(self, ids: Iterable[int]) -> str:
        """The text that has become final."""
        visible, push = self._tokenizer.visible_token, self._state.push
        return "".join([push(token) for token_id in ids if (token := visible(token_id)) is not None])

    def finish(self) -> str:
        """The rest: an unfinished character as U+FFFD, as the full decode has it. Push nothing afterwards."""
        return self._state.finish()


def state_factory(decoder: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """What kind of state a tokenizer's decoder (as in tokenizer.json) needs: "byte_level", or "byte_fallback" with its
    arguments. Raises ValueError naming a decoder that is not supported."""
    steps = _flatten(decoder)
    kinds = [step["type"] for step in steps]
    if [kind for kind in kinds if kind != "Fuse"] == ["ByteLevel"]:
        return "byte_level", {}
    strip_left = 0
    spaces = False
    for step in steps:
        if step["type"] == "Replace" and step["pattern"] == {"String": _METASPACE} and step["content"] == " ":
            spaces = True
        elif step["type"] == "Strip" and step["content"] == " " and step["stop"] == 0 and "Fuse" in kinds:
            strip_left = step["start"]
        elif step["type"] not in ("ByteFallback", "Fuse"):
            raise ValueError(f"tokenizer.json: decoder {step['type']!r} is not supported")
    if not spaces:
        raise ValueError(f"tokenizer.json: decoder {kinds} is not supported")
    return "byte_fallback", {"strip_left": strip_left, "byte_fallback": "ByteFallback" in kinds}


def _flatten(decoder: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if decoder is None:
        return ()
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return (decoder,)


def _byte_level_alphabet() -> dict[str, int]:
    """Character to byte: printable bytes stand for themselves, the others for U+0100 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_level_alphabet()
