"""Which pages a request can take over: full pages known by a hash chain that starts from the adapter's revision.

K and V depend on the adapter, so equal tokens under another revision never match; equal content under two names does.
A page's key is a digest over its parent's key and its tokens: equal keys mean equal prefixes (collisions of a 128-bit
digest aside).
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from model_server.page_pool import PagePool
from model_server.request import AdapterRef, Request

_BASE_ROOT = blake2b(b"base", digest_size=16).digest()


class PrefixCache:
    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def match(self, request: Request) -> list[int]:
        """The longest run of pages that hold the request's first tokens. Not held yet: the caller does that.

        Never the whole request: at least one token is left to compute, or there would be no logits.
        """
        pages: list[int] = []
        for key in self._keys(request, (request.num_tokens - 1) // self._page_size):
            page = self._pool.find(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def count(self, num_queried: int, num_hit: int) -> None:
        self.num_queried_tokens += num_queried
        self.num_hit_tokens += num_hit

    def publish(self, request: Request, num_computed_before: int) -> None:
        """Make the pages known that this step filled. Call after the step, when their content is there."""
        first, last = num_computed_before // self._page_size, request.num_computed // self._page_size
        if last > first:
            for index, key in enumerate(self._keys(request, last)[first:], start=first):
                self._pool.publish(request.page_table[index], key)

    def _keys(self, request: Request, num_pages: int) -> list[bytes]:
        """Keys of the first `num_pages` full pages; kept on the request, since its past tokens never change."""
        keys = request.page_keys
        if len(keys) < num_pages:
            parent = keys[-1] if keys else _root(request.adapter)
            tokens = request.tokens(len(keys) * self._page_size, num_pages * self._page_size)
            for start in range(0, len(tokens), self._page_size):
                page = array("i", tokens[start : start + self._page_size]).tobytes()
                parent = blake2b(page, key=parent, digest_size=16).digest()
                keys.append(parent)
        return keys[:num_pages]


def _root(adapter: AdapterRef | None) -> bytes:
    return (
        _BASE_ROOT if adapter is None else blake2b(adapter.revision.encode(), key=b"adapter", digest_size=16).digest()
    )
