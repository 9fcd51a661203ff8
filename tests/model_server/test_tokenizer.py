"""Ids, templates and text as transformers has them for the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers.processors import TemplateProcessing
from transformers.integrations.gguf import convert_gguf_tokenizer

from model_server.detokenizer import IncrementalDetokenizer
from model_server.tokenizer import Tokenizer
from model_server.weights import ModelFiles
from model_server.weights.gguf_tokenizer import build_tokenizer
from protos.errors import ServiceError
from tests.model_server.tokenizers_for_tests import byte_level, sentence_piece

TEXTS = [
    "Hello world",
    "",
    " leading and trailing ",
    "tabs\tand\r\nlines\n\n\n  indented",
    "def f(x):\n    return {'a': x ** 2}  # why?",
    "I'm sure they've said we'll; DON'T",
    "访问 ď 🌶️ 👨‍👩‍👧‍👦 🇫🇷 ﷺ",
    "x=1234,567.89 3rd 4²",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "naïve café — “quotes” … e\u0301",
]
CHAT = [{"role": "user", "content": "What is <b>2 + 2</b>? 😀"}]
CONVERSATION = [{"role": "system", "content": "Be brief."}, *CHAT, {"role": "assistant", "content": "4"}, *CHAT]


@pytest.fixture(scope="module")
def theirs(smollm2_path: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)


def test_smollm2_encodes_and_decodes_as_transformers(smollm2: ModelFiles, theirs: Any) -> None:
    ours = smollm2.tokenizer
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special=False) == text
        detokenizer = IncrementalDetokenizer(ours)
        assert "".join([detokenizer.push([i]) for i in ids]) + detokenizer.finish() == ours.decode(ids)


def test_smollm2_splits_digits_from_the_spaces_before_them(smollm2: ModelFiles) -> None:
    ours = smollm2.tokenizer
    # As its own tokenizer.json and llama.cpp do. transformers' reading of the GGUF file leaves that step out.
    assert ours.encode("a  1") == [*ours.encode("a"), *ours.encode("  "), *ours.encode("1")]


@pytest.mark.parametrize("messages", [CHAT, CONVERSATION])
def test_smollm2_chat_template(smollm2: ModelFiles, theirs: Any, messages: list[dict[str, str]]) -> None:
    ours = smollm2.tokenizer
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(messages) == rendered
    assert ours.encode_chat(messages) == theirs.encode(rendered, add_special_tokens=False)


def save(path: Path, backend: Any, config: dict[str, Any], template: str | None = None) -> Tokenizer:
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return Tokenizer.from_directory(path)


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_tokenizer_json_says_what_stands_around_a_text(begins: bool, config: dict[str, Any], tmp_path: Path) -> None:
    backend = byte_level()
    if begins:
        backend.post_processor = TemplateProcessing(
            single="<s> $A", pair="<s> $A $B:1", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    ours = save(tmp_path, backend, config)
    assert (ours.encode("a") == ours.encode("a", add_special=False)) != begins
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False)


TEMPLATE = """{%- if messages[0].role == 'tool' %}{{ raise_exception('no ' + 'tools') }}{% endif %}
    {% for message in messages %}
  {%- if loop.index0 > 5 %}{% break %}{% endif %}
{{ bos_token }}[{{ message.role }}]{{ message | tojson }}
    {% endfor %}
{% generation %}x{% endgeneration %}{{ strftime_now('%Y') | length }}{{ tools is none }}
{% if add_generation_prompt %}>{% endif %}
"""


@pytest.mark.parametrize("place", ["jinja", "config", "named"])
def test_template_environment_equals_transformers(place: str, tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    config = {"jinja": {"chat_template": "not this one"}, "config": {"chat_template": TEMPLATE},
              "named": {"chat_template": named}}[place]  # fmt: skip
    ours = save(tmp_path, byte_level(), config, TEMPLATE if place == "jinja" else None)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.apply_chat_template(CONVERSATION) == theirs.apply_chat_template(
        CONVERSATION, tokenize=False, add_generation_prompt=True, chat_template=TEMPLATE
    )


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (None, CHAT, "no chat template"),
        (TEMPLATE, [{"role": "tool", "content": ""}], "no tools"),
        ("{{ messages.__class__.__mro__ }}", CHAT, "unsafe"),
        ("{{ messages[3].content }}", CHAT, "no element 3"),
    ],
)
def test_what_a_template_refuses_names_the_field(
    template: str | None, messages: list[dict[str, str]], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ServiceError, match=reason) as raised:
        save(tmp_path, byte_level(), {}, template).apply_chat_template(messages)
    assert raised.value.field == "prompt.chat"


def test_files_that_are_missing_or_broken_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    with pytest.raises(ValueError, match="does not compile"):
        save(tmp_path, byte_level(), {}, "{% for %}")


def gguf_metadata(pre: str) -> dict[str, Any]:
    backend = json.loads(byte_level().to_str())
    vocab = backend["model"]["vocab"] | {token["content"]: token["id"] for token in backend["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [3 if t in ("<s>", "</s>", "<|im_start|>") else 4 if t == "<pläin text>" else 1 for t in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "[PAD]"],
        "tokenizer.ggml.token_type": [*kinds, 5],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in backend["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
    }


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2", "default", "gpt-2"])
def test_gguf_byte_level_tokenizers_round_trip(pre: str) -> None:
    tokenizer = build_tokenizer(gguf_metadata(pre))
    begins = pre == "llama-bpe"
    for text in [*TEXTS, "a <pläin text> b"]:
        ids = tokenizer.encode(text)
        assert (ids[:1] == [gguf_metadata(pre)["tokenizer.ggml.bos_token_id"]]) == begins
        assert tokenizer.decode(ids) == (text.replace("e\u0301", "é") if pre == "qwen2" else text).replace(
            "<|im_start|>", ""
        )
    assert tokenizer.decode([gguf_metadata(pre)["tokenizer.ggml.tokens"].index("[PAD]")]) == ""


def test_gguf_sentence_piece_equals_transformers() -> None:
    # Scores as SentencePiece writes them: minus the order in which pieces were learned.
    pieces = ["▁t", "he", "▁a", "in", "▁the", "re", "▁there", "an", "▁an", "ing", "th"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *"▁theraing"]
    tokens = list(dict.fromkeys(tokens))
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    ours = build_tokenizer(metadata)
    kinds = metadata["tokenizer.ggml.token_type"]
    theirs, _ = convert_gguf_tokenizer(
        "llama", {"tokenizer_type": "llama", "tokens": tokens, "scores": scores, "token_type": kinds}
    )
    for text in ["there is a thing", " an inn, then 7 😀", "the the  the", "therein", "an</s>the"]:
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text)[0] == 1
        assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, r"tokenizer\.ggml\.model 't5'"),
        ({"tokenizer.ggml.pre": "mystery"}, r"tokenizer\.ggml\.pre 'mystery'"),
        ({"tokenizer.ggml.tokens": []}, r"tokenizer\.ggml\.tokens"),
    ],
)
def test_gguf_tokenizers_that_are_not_supported_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_tokenizer(gguf_metadata("smollm") | change)


def test_sentence_piece_directory(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, sentence_piece(), {})
    assert tokenizer.decode(tokenizer.encode("世é")) == "世é"
