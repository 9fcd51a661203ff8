"""Small tokenizers of each kind, trained on nothing: the whole vocabulary is spelled out here."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

SPECIALS = ["<s>", "</s>", "<|im_start|>"]


def byte_level() -> Tokenizer:
    """256 bytes, a few merges, three special tokens and an added one that is plain text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("i", "n")]
    vocab = {token: index for index, token in enumerate([*alphabet, *(left + right for left, right in merges)])}
    backend = Tokenizer(BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    backend.add_tokens([AddedToken("<pläin text>", normalized=False)])
    return backend


def sentence_piece(strip: bool = True) -> Tokenizer:
    """SentencePiece's BPE as Llama 2 has it: ▁ for a space, bytes as <0xXX>."""
    pieces = ["▁", "▁leading", "▁I", "▁am", "▁test", "ing", "a", "b", "世", "é", "<0xZZ>"]
    tokens = ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    backend = Tokenizer(
        BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    return backend
