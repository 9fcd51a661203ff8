"""The bank's books: who is evicted, what pins keep, what they must leave."""

from __future__ import annotations

import pytest

from model_server.adapter_bank import AdapterBank, HostAdapter
from model_server.request import AdapterRef

GROUPS = ("qkv", "down")


def ref(name: str) -> AdapterRef:
    return AdapterRef(name, f"sha256:{name}")


def bank(rows: int = 16, places: int = 2, max_rank: int = 8, host_bytes: int = 10**6) -> AdapterBank:
    return AdapterBank(dict.fromkeys(GROUPS, rows), places, max_rank, host_bytes)


def add(bank: AdapterBank, name: str, rank: int = 8, groups: tuple[str, ...] = GROUPS) -> AdapterRef:
    bank.add_host(ref(name), HostAdapter(dict.fromkeys(groups, rank), 100 * rank, name))
    return ref(name)


def use(bank: AdapterBank, adapter: AdapterRef) -> None:
    """A request comes, runs and goes."""
    bank.acquire(adapter)
    bank.leave(adapter)


def test_a_pinned_adapter_outlives_every_rotation() -> None:
    books = bank()
    kept, b, c = (add(books, name) for name in "abc")
    assert books.can_pin(kept)
    books.pin(kept)
    books.place(kept)
    for adapter in (b, c, b, c):
        use(books, adapter)
        assert books.resident.keys() == {kept, adapter}
        books.check_integrity({}, {})


def test_unpinned_it_goes_when_its_turn_comes() -> None:
    books = bank()
    kept, b, c = (add(books, name) for name in "abc")
    books.pin(kept)
    books.place(kept)
    use(books, b)
    books.unpin(kept)
    use(books, c)
    assert books.resident.keys() == {b, c}, "the least recently used goes first, pinned before or not"


def test_host_memory_keeps_what_is_pinned_before_it_is_resident() -> None:
    books = bank(host_bytes=1600)
    kept = add(books, "a")
    books.pin(kept)
    for name in "bcd":
        add(books, name)
        assert books.has_host(kept)
    assert books.host.keys() == {kept, ref("d")}
    assert books.num_bytes_in_use == 800
    books.unpin(kept)
    add(books, "e")
    assert not books.has_host(kept)


def test_pins_leave_a_place_and_the_largest_rank() -> None:
    books = bank(rows=20, places=3, max_rank=12)
    small, large = add(books, "small", 8), add(books, "large", 9)
    assert not books.can_pin(large)
    assert books.can_pin(small)
    books.pin(small)
    assert books.can_pin(small), "again: nothing more is taken"
    assert not books.can_pin(add(books, "one", 1))
    books.check_integrity({}, {})

    crowded = bank(rows=100, places=2, max_rank=8)
    crowded.pin(add(crowded, "a"))
    assert not crowded.can_pin(add(crowded, "b")), "no place would be left"


def test_rows_count_in_the_groups_an_adapter_has() -> None:
    books = bank(rows=16, places=4)
    books.pin(add(books, "attention", 8, ("qkv",)))
    assert books.can_pin(add(books, "mlp", 8, ("down",)))
    assert not books.can_pin(add(books, "more attention", 1, ("qkv",)))


def test_a_bank_of_one_place_or_of_its_largest_rank_takes_no_pin() -> None:
    for books in (bank(rows=100, places=1), bank(rows=8, places=4)):
        assert not books.can_pin(add(books, "a", 1))


def test_integrity_notices_a_lost_pin() -> None:
    books = bank()
    books.pin(add(books, "a"))
    del books.host[ref("a")]
    with pytest.raises(AssertionError, match="pinned"):
        books.check_integrity({}, {})


def test_what_a_waiting_request_wants_goes_last() -> None:
    books = bank()
    a, b, c = (add(books, name) for name in "abc")
    use(books, a)
    use(books, b)
    books.use_host(a)
    use(books, c)
    assert books.resident.keys() == {a, c}, "b was used later, but nobody waits for it"
    books.use_host(c)
    use(books, b)
    assert books.resident.keys() == {b, c}, "nothing else is left to evict"
    books.check_integrity({}, {a: 1, c: 1})
