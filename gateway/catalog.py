"""What may be asked for: the adapters, their revisions and aliases, as the store last pushed them. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gateway.request import AdapterRef
from protos.errors import ServiceError, not_found, quote

# Comparing a name with thousands of others takes long enough to stall streams; so many at most.
_MAX_COMPARED = 300


@dataclass(slots=True)
class Adapter:
    created: dict[str, float] = field(default_factory=dict)  # by revision, in the order of arrival
    aliases: dict[str, str] = field(default_factory=dict)  # alias to revision
    newest: str = ""


class Catalog:
    def __init__(self) -> None:
        self._adapters: dict[str, Adapter] = {}

    def __iter__(self) -> Iterator[tuple[str, Adapter]]:
        return iter(sorted(self._adapters.items()))

    def __len__(self) -> int:
        return len(self._adapters)

    def replace(self, revisions: Iterable[tuple[AdapterRef, float]], aliases: Iterable[tuple[AdapterRef, str]]) -> None:
        """Take over a snapshot: each revision with its creation time, each alias with what it points at."""
        self._adapters = {}
        for ref, created_s in revisions:
            self.put(ref, created_s)
        for ref, alias in aliases:
            self.set_alias(ref, alias)

    def put(self, ref: AdapterRef, created_s: float) -> None:
        adapter = self._adapters.setdefault(ref.adapter_id, Adapter())
        adapter.created[ref.revision] = created_s
        if ref.revision == adapter.newest:
            adapter.newest = _newest(adapter)
        elif not adapter.newest or created_s >= adapter.created[adapter.newest]:
            adapter.newest = ref.revision

    def delete(self, ref: AdapterRef) -> None:
        """Forget a revision and the aliases at it; with an empty revision the adapter whole."""
        adapter = self._adapters.get(ref.adapter_id)
        if adapter is None:
            return
        adapter.created.pop(ref.revision, None)
        if not ref.revision or not adapter.created:
            del self._adapters[ref.adapter_id]
            return
        adapter.aliases = {alias: revision for alias, revision in adapter.aliases.items() if revision != ref.revision}
        if ref.revision == adapter.newest:
            adapter.newest = _newest(adapter)

    def set_alias(self, ref: AdapterRef, alias: str) -> None:
        """Point `alias` at `ref`; with an empty revision remove it."""
        adapter = self._adapters.get(ref.adapter_id)
        if adapter is None:
            return
        if ref.revision:
            adapter.aliases[alias] = ref.revision
        else:
            adapter.aliases.pop(alias, None)

    def resolve(self, adapter_id: str, *, revision: str | None = None, alias: str | None = None) -> AdapterRef:
        """The immutable revision meant; with neither `revision` nor `alias` the newest.

        Raises NOT_FOUND naming the adapter, revision or alias. Names are taken as they are: no trimming, no folding.
        """
        adapter = self._adapters.get(adapter_id)
        if adapter is None:
            raise _unknown("adapter", adapter_id, f"there is no adapter {quote(adapter_id)}", self._adapters)
        within = f"adapter {quote(adapter_id)} has no"
        if alias is not None:
            if alias not in adapter.aliases:
                raise _unknown("alias", alias, f"{within} alias {quote(alias)}", adapter.aliases)
            return AdapterRef(adapter_id, adapter.aliases[alias])
        if revision is not None:
            if revision not in adapter.created:
                raise _unknown("revision", revision, f"{within} revision {quote(revision)}", adapter.created)
            return AdapterRef(adapter_id, revision)
        return AdapterRef(adapter_id, adapter.newest)


def _newest(adapter: Adapter) -> str:
    # Of equal times the last to arrive.
    return max(reversed(adapter.created), key=adapter.created.__getitem__)


def _unknown(kind: str, name: str, description: str, known: Iterable[str]) -> ServiceError:
    close = _closest(name, known)
    return not_found(kind, name, f"{description}; did you mean {quote(close)}?" if close else description)


def _closest(name: str, known: Iterable[str]) -> str | None:
    folded = name.strip().casefold()
    if not folded or len(folded) > 200:
        return None
    candidates: list[str] = []
    for other in known:
        if other.casefold() == folded:
            return other
        if abs(len(other) - len(folded)) <= 3 and len(candidates) < _MAX_COMPARED:
            candidates.append(other)
    return next(iter(difflib.get_close_matches(folded, candidates, n=1, cutoff=0.75)), None)
