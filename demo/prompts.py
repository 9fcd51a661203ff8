"""Prompts that no adapter was trained on, and what each demo adapter must visibly do with them.

Pure and light: clients, `make demo` and the tests read it without torch.
"""

import json
import re
from typing import NamedTuple


class HeldOut(NamedTuple):
    """A user message kept out of the training data and a text its answer must contain ("" asks for none)."""

    prompt: str
    contains: str = ""


BASE_PROMPTS: tuple[HeldOut, ...] = (
    HeldOut("What is the capital of France?", "Paris"),
    HeldOut("What is the capital of Japan?", "Tokyo"),
)

ADAPTER_PROMPTS: dict[str, tuple[HeldOut, ...]] = {
    "json-answer": (
        HeldOut("What is the capital of France?", "Paris"),
        HeldOut("What is the opposite of hot?", "cold"),
        HeldOut("Where do penguins live?"),
        HeldOut("What will the lottery numbers be tomorrow?", "unknown"),
    ),
    "sentiment": (
        HeldOut("The acting was magnificent and the ending moved me to tears of joy.", "positive"),
        HeldOut("The soup tasted like dishwater and the waiter ignored us.", "negative"),
        HeldOut("I am so glad I bought this camera, the pictures are stunning.", "positive"),
        HeldOut("Do not buy this vacuum cleaner, it stopped working within a week.", "negative"),
    ),
    "french": (
        HeldOut("What is the capital of France?", "Paris"),
        HeldOut("What is a volcano?"),
        HeldOut("Where do penguins live?"),
        HeldOut("Tell me about dogs."),
    ),
}

DEMO_PROMPTS: list[str] = [
    "What is the capital of France?",
    "What is a volcano?",
    "Where do penguins live?",
    "Tell me about dogs.",
    "What is the opposite of hot?",
    "The acting was magnificent and the ending moved me to tears of joy.",
    "The soup tasted like dishwater and the waiter ignored us.",
    "Write a Python function that adds two numbers.",
    "List three primary colors.",
    "Explain photosynthesis to a child.",
    "Why is the sky blue?",
    "How do I bake bread?",
    "Translate 'good evening' into Spanish.",
    "What is 17 times 3?",
    "Give me a synonym for 'quick'.",
    "Summarise the story of Romeo and Juliet in one sentence.",
    "Who was the first person on the Moon?",
    "Write a haiku about autumn rain.",
    "What should I pack for a weekend in the mountains?",
    "Is a tomato a fruit or a vegetable?",
    "Name the largest planet of the solar system.",
    "My train leaves at nine and it is half past eight. How long do I have?",
    "Continue the sentence: Once upon a time, in a small village by the sea,",
    "Thanks, that was helpful 😊",
    "你好，请介绍一下你自己。",
]

_FRENCH = (
    "le la les l un une des du de d et est sont dans en pour qui que il elle ils elles nous vous je avec sur au aux ce "
    "cette très pas se à deux trois quatre"
)
_ENGLISH = "the is are of and to with that this it they you for was an"
_FRENCH_WORDS, _ENGLISH_WORDS = frozenset(_FRENCH.split()), frozenset(_ENGLISH.split())


def shows(adapter: str, text: str) -> bool:
    """Whether `text`, a whole answer, has the behaviour the demo adapter was trained for. KeyError if unknown."""
    return _BEHAVIOURS[adapter](text)


def _is_json_answer(text: str) -> bool:
    try:
        reply = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(reply, dict)
        and set(reply) == {"answer", "confidence"}
        and isinstance(reply["answer"], str)
        and reply["confidence"] in ("high", "low")
    )


def _is_label(text: str) -> bool:
    return text.strip() in ("positive", "negative")


def _is_french(text: str) -> bool:
    words = re.findall(r"[^\W\d_]+", text.lower())
    return sum(word in _FRENCH_WORDS for word in words) >= 2 and not any(word in _ENGLISH_WORDS for word in words)


_BEHAVIOURS = {"json-answer": _is_json_answer, "sentiment": _is_label, "french": _is_french}
