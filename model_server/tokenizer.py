"""Text to token ids and back, as transformers does it for the same model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from model_server.chat_template import FIELD, ChatTemplate
from model_server.detokenizer import ByteFallbackState, ByteLevelState, TextState, state_factory
from protos import errors


class Tokenizer:
    """Thread-safe: `encode` and `decode` release the interpreter lock and keep no state."""

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], chat_template: str | None = None
    ) -> None:
        """`special_tokens` by role: "bos_token", "eos_token", … Raises ValueError for an unsupported decoder."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._state_kind, self._state_arguments = state_factory(json.loads(backend.to_str())["decoder"])
        self._special_ids = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._visible: dict[int, str | None] = {}
        self._template = ChatTemplate(chat_template, special_tokens) if chat_template else None

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """From tokenizer.json, tokenizer_config.json and chat_template.jinja; only the first must be there.

        Raises FileNotFoundError or ValueError naming the file.
        """
        file = path / "tokenizer.json"
        if not file.exists():
            raise FileNotFoundError(f"{path} lacks tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{file}: {error}") from error
        config_file, template_file = path / "tokenizer_config.json", path / "chat_template.jinja"
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.exists() else {}
        special_tokens = {
            key: value["content"] if isinstance(value, dict) else value
            for key, value in config.items()
            if key.endswith("_token") and isinstance(value, str | dict)
        }
        template = _default_template(config.get("chat_template"))
        if template_file.exists():
            template = template_file.read_text(encoding="utf-8")
        return cls(backend, special_tokens, template)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id it knows; a model's vocabulary may be padded past it."""
        return int(max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)) + 1

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """`add_special` adds what the model wants around a text (usually a BOS token, or nothing)."""
        return list(self._backend.encode(text, add_special_tokens=add_special).ids)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        """See `ChatTemplate.render`. Raises INVALID_ARGUMENT naming prompt.chat when the model has no template."""
        if self._template is None:
            raise errors.invalid_argument(FIELD, "the model has no chat template; send text or token ids")
        return self._template.render(messages)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        # The template has written the special tokens itself.
        return self.encode(self.apply_chat_template(messages), add_special=False)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of all of `ids`; those it does not know give nothing."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special))

    def visible_token(self, token_id: int) -> str | None:
        """See `detokenizer.TokenSource`."""
        try:
            return self._visible[token_id]
        except KeyError:
            token = None if token_id in self._special_ids else self._backend.id_to_token(token_id)
            # Only ids it knows are remembered: the cache stays within the vocabulary.
            if token is not None:
                self._visible[token_id] = token
            return token

    def text_state(self) -> TextState:
        """A fresh decoding state for one stream."""
        return ByteLevelState() if self._state_kind == "byte_level" else ByteFallbackState(**self._state_arguments)


def _default_template(value: Any) -> str | None:
    """tokenizer_config.json's chat_template: a template, or a list of named ones."""
    if isinstance(value, list):
        return next((entry["template"] for entry in value if entry.get("name") == "default"), None)
    return value if isinstance(value, str) else None
