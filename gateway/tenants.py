"""Whose request it is: the tenant comes from the API key, never from the request."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from protos.errors import unauthenticated

ANONYMOUS = "anonymous"
_SCHEME = "bearer "


class Tenants:
    """`api_keys` maps key to tenant; empty leaves the gateway open and everyone "anonymous"."""

    def __init__(self, api_keys: Mapping[str, str]) -> None:
        # Looked up by digest, so that how long a lookup takes says nothing about the keys.
        self._by_digest = {_digest(key): tenant for key, tenant in api_keys.items()}

    def authenticate(self, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """The tenant. Raises UNAUTHENTICATED without a known key in `authorization`."""
        if not self._by_digest:
            return ANONYMOUS
        value = next((value for key, value in metadata if key == "authorization"), None)
        if not isinstance(value, str):
            raise unauthenticated("metadata `authorization` is missing; send `Bearer <API key>`")
        if not value.lower().startswith(_SCHEME):
            raise unauthenticated("metadata `authorization` must be `Bearer <API key>`")
        tenant = self._by_digest.get(_digest(value[len(_SCHEME) :].strip()))
        if tenant is None:
            raise unauthenticated("the API key is not known")
        return tenant


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
