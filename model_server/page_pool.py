"""The KV memory as numbered pages: who holds each, which are free, which are kept for reuse. Pure; the runner owns the bytes.

A page is in exactly one of three places: held (one or more holders), kept (no holder, but its content is known by a key
and may be asked for again) or free. Kept pages are given away, least recently released first, when no free page is left.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable


class OutOfPagesError(Exception):
    """No page is free or kept. The scheduler decides who must give way."""


class PagePool:
    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages: {num_pages}, want at least 1")
        self.num_pages = num_pages
        self._holders = [0] * num_pages
        self._key_of: list[Hashable | None] = [None] * num_pages
        self._page_of: dict[Hashable, int] = {}
        # Handed out lowest first at the start: an idle server's pages stay together.
        self._free = list(range(num_pages - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give now, kept ones included."""
        return len(self._free) + len(self._kept)

    def allocate(self) -> int:
        """A page with one holder and no key."""
        if self._free:
            page = self._free.pop()
        elif self._kept:
            page, _ = self._kept.popitem(last=False)
            self._forget(page)
        else:
            raise OutOfPagesError
        self._holders[page] = 1
        return page

    def release(self, pages: Iterable[int]) -> None:
        """Give up one hold on each. Pass a request's last page first, so that the start of a prefix is kept longest."""
        for page in pages:
            if self._holders[page] <= 0:
                raise AssertionError(f"page {page} released without a holder")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if self._key_of[page] is None:
                    self._free.append(page)
                else:
                    self._kept[page] = None

    def num_freed_by(self, page_tables: Iterable[Iterable[int]]) -> int:
        """Pages that would have no holder left if each of these gave up its holds."""
        holds = Counter(page for pages in page_tables for page in pages)
        return sum(self._holders[page] == count for page, count in holds.items())

    def publish(self, page: int, key: Hashable) -> None:
        """Say what a held page contains, so that `find` can give it to others. The first page of a content wins."""
        if self._key_of[page] is None and key not in self._page_of:
            self._key_of[page] = key
            self._page_of[key] = page

    def find(self, key: Hashable) -> int | None:
        return self._page_of.get(key)

    def is_kept(self, page: int) -> bool:
        return page in self._kept

    def hold(self, page: int) -> None:
        """One more holder of a page that `find` gave."""
        if self._holders[page] == 0:
            del self._kept[page]
        self._holders[page] += 1

    def _forget(self, page: int) -> None:
        key = self._key_of[page]
        if key is not None:
            del self._page_of[key]
            self._key_of[page] = None

    def check_integrity(self, holds: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless the holders counted are exactly `holds`: each request's pages."""
        counted = [0] * self.num_pages
        for pages in holds:
            for page in pages:
                counted[page] += 1
        assert counted == self._holders, "page holders differ from the requests' page tables"
        free, kept = set(self._free), set(self._kept)
        assert len(free) == len(self._free) and not free & kept, "a page is free twice"
        # Counted, not walked page by page: a large pool is checked between two requests.
        num_held = self.num_pages - self._holders.count(0)
        assert num_held + len(free) + len(kept) == self.num_pages, "a page is both held and free, or lost"
        assert not any(self._holders[page] for page in free | kept), "a page is both held and free"
        assert len(self._page_of) == self.num_pages - self._key_of.count(None), "a page has a key nobody finds it by"
        assert all(self._key_of[page] == key for key, page in self._page_of.items()), "a key leads to another page"
        assert all(self._key_of[page] is not None for page in kept), "a page is kept without a key"
