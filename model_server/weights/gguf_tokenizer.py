"""The tokenizer a GGUF file's metadata describes, rebuilt for the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from model_server.tokenizer import Tokenizer as OurTokenizer

# How each byte-level vocabulary split text when its merges were learned (`tokenizer.ggml.pre`).
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_GPT2_NAMES = ("default", "gpt-2", "gpt2")
_SUPPORTED = (*_GPT2_NAMES, *_LLAMA3_NAMES, "qwen2", "smollm")


class _Kind(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build_tokenizer(metadata: Mapping[str, Any]) -> OurTokenizer:
    """Raises ValueError naming the key that is missing or not supported."""
    tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens", ())
    if not tokens:
        raise ValueError("the GGUF file lacks tokenizer.ggml.tokens")
    kinds: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or [_Kind.NORMAL] * len(tokens)
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        backend = _byte_level(metadata, tokens, kinds)
    elif model == "llama":
        backend = _sentence_piece(metadata, tokens)
    else:
        raise ValueError(f"tokenizer.ggml.model {model!r} is not supported; supported: gpt2, llama")
    backend.add_special_tokens(
        [AddedToken(t, normalized=False) for t, kind in zip(tokens, kinds, strict=True) if kind == _Kind.CONTROL]
    )
    backend.add_tokens(
        [AddedToken(t, normalized=False) for t, kind in zip(tokens, kinds, strict=True) if kind == _Kind.USER_DEFINED]
    )
    special = {
        f"{role}_token": tokens[metadata[key]]
        for role, key in (
            ("bos", "tokenizer.ggml.bos_token_id"),
            ("eos", "tokenizer.ggml.eos_token_id"),
            ("unk", "tokenizer.ggml.unknown_token_id"),
            ("pad", "tokenizer.ggml.padding_token_id"),
        )
        if key in metadata
    }
    # Files from before the flag: these two kinds always began with BOS.
    begins = model == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    _add_around(
        backend,
        special.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", begins) else None,
        special.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    return OurTokenizer(backend, special, metadata.get("tokenizer.chat_template"))


def _add_around(backend: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `encode` put `bos` before and `eos` after a text, where given."""
    single = " ".join(f"{part}:0" for part in (bos, "$A", eos) if part)
    tokens = [(token, backend.token_to_id(token)) for token in (bos, eos) if token]
    backend.post_processor = TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=tokens)


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _SUPPORTED:
        raise ValueError(f"tokenizer.ggml.pre {pre!r} is not supported; supported: {', '.join(_SUPPORTED)}")
    # Unused entries only pad the vocabulary to the model's: ids without a text.
    vocab = {t: i for i, (t, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _Kind.UNUSED}
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", ())]
    llama3 = pre in _LLAMA3_NAMES
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=llama3))
    if llama3 or pre == "qwen2":
        split = Regex(_LLAMA3_SPLIT if llama3 else _QWEN2_SPLIT)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(split, behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif pre == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    backend = Tokenizer(
        BPE(
            vocab=vocab,
            merges=_merges(vocab, metadata.get("tokenizer.ggml.scores", ())),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if prefix else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose piece scores best; as ranked merges, all splits of a piece take its rank."""
    if len(scores) != len(vocab):
        raise ValueError("tokenizer.ggml.scores must hold one score per token")
    ranked = []
    for piece, index in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[index], -len(left), left, right))
    ranked.sort(key=lambda entry: entry[:2])
    return [(left, right) for _, _, left, right in ranked]
