"""One budget, two parts: never more than it together, what is given is obeyed, what contradicts itself is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from model_server.config import Config
from model_server.memory_budget import MemoryParts, divide

SIZES = st.integers(1, 2**42)
SHARES = st.floats(0, 1, exclude_max=True)


@given(SIZES, SHARES, SIZES)
def test_parts_fill_the_budget_and_never_exceed_it(memory_bytes: int, share: float, limit_bytes: int) -> None:
    parts = divide(memory_bytes, adapter_share=share, adapter_limit_bytes=limit_bytes)
    assert parts.kv_bytes + parts.adapter_bytes == memory_bytes
    assert 0 <= parts.adapter_bytes <= min(limit_bytes, memory_bytes * share)


@given(SIZES, SIZES, SHARES, SIZES)
def test_one_part_given_leaves_the_rest(memory_bytes: int, given_bytes: int, share: float, limit_bytes: int) -> None:
    if given_bytes < memory_bytes:
        parts = divide(memory_bytes, adapter_share=share, adapter_limit_bytes=limit_bytes, adapter_bytes=given_bytes)
        assert parts == MemoryParts(memory_bytes - given_bytes, given_bytes)
        parts = divide(memory_bytes, adapter_share=share, adapter_limit_bytes=limit_bytes, kv_bytes=given_bytes)
        assert parts == MemoryParts(given_bytes, min(limit_bytes, memory_bytes - given_bytes))
    elif given_bytes > memory_bytes:
        with pytest.raises(ValueError, match=r"^adapter_bytes"):
            divide(memory_bytes, adapter_share=share, adapter_limit_bytes=limit_bytes, adapter_bytes=given_bytes)
        with pytest.raises(ValueError, match=r"^kv_bytes"):
            divide(memory_bytes, adapter_share=share, adapter_limit_bytes=limit_bytes, kv_bytes=given_bytes)


@given(SIZES, SIZES, SIZES, SHARES)
def test_both_given_are_taken_as_they_are(memory_bytes: int, kv_bytes: int, adapter_bytes: int, share: float) -> None:
    parts = divide(
        memory_bytes, adapter_share=share, adapter_limit_bytes=1, kv_bytes=kv_bytes, adapter_bytes=adapter_bytes
    )
    assert parts == MemoryParts(kv_bytes, adapter_bytes)


def test_without_adapters_all_is_for_kv() -> None:
    assert divide(1000, adapter_share=0.25, adapter_limit_bytes=0) == MemoryParts(1000, 0)
    assert divide(1000, adapter_share=0.25, adapter_limit_bytes=0, kv_bytes=2000) == MemoryParts(2000, 0)


def test_a_budget_without_one_page_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^memory_bytes: 75 bytes"):
        divide(100, adapter_share=0.25, adapter_limit_bytes=100, page_bytes=76)
    with pytest.raises(ValueError, match=r"^kv_bytes: 75 bytes"):
        divide(100, adapter_share=0.25, adapter_limit_bytes=100, kv_bytes=75, page_bytes=76)
    assert divide(100, adapter_share=0.25, adapter_limit_bytes=100, page_bytes=75).kv_bytes == 75


STORE = {"adapter_store": "localhost:50071"}


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"kv_bytes": 0}, "kv_bytes"),
        ({"adapter_bytes": -1}, "adapter_bytes"),
        ({"adapter_share": 1.0}, "adapter_share"),
        ({"adapter_share": float("nan")}, "adapter_share"),
        ({"memory_bytes": 100, "kv_bytes": 101}, "kv_bytes"),
        ({"memory_bytes": 100, "adapter_bytes": 100}, "adapter_bytes"),
        ({"adapter_bytes": 101, "host_adapter_bytes": 100}, "host_adapter_bytes"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings: dict[str, float], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        Config.model_validate(STORE | settings)


def test_settings_are_divided_as_they_say() -> None:
    assert Config.model_validate(STORE).memory_parts(2**30) == MemoryParts(3 * 2**28, 2**28)
    assert Config().memory_parts(2**30) == MemoryParts(2**30, 0)
    limited = Config.model_validate(STORE | {"host_adapter_bytes": 100, "memory_bytes": 1000})
    assert limited.memory_parts(1000) == MemoryParts(900, 100)
    both = Config.model_validate(STORE | {"kv_bytes": 70, "adapter_bytes": 80, "memory_bytes": 100})
    assert both.memory_parts(100) == MemoryParts(70, 80)
