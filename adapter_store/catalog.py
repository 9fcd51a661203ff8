"""Which revisions and aliases exist. The one place where the store's state changes, one numbered change at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from adapter_store import tables
from adapter_store.records import Alias, Change, Deleted, Revision, Snapshot
from adapter_store.subscription import Subscription
from protos.errors import failed_precondition, quote, resource_exhausted


class Catalog:
    """Revisions, their files and aliases in a SQL database, and the stream of changes to them.

    Every method blocks; call them from threads. A lock orders them, so that each subscriber sees the changes in the
    order of their versions. Nothing else may write to the database meanwhile.
    """

    def __init__(self, database_url: str, max_bytes: int) -> None:
        """`max_bytes` bounds a snapshot of everything, which travels as one message."""
        self._engine = sa.create_engine(database_url)
        if self._engine.dialect.name == "sqlite":
            sa.event.listen(self._engine, "connect", _configure_sqlite)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._subscriptions: list[Subscription] = []
        tables.metadata.create_all(self._engine)
        with self._engine.begin() as connection:
            tables.start_numbering(connection)

    def close(self) -> None:
        self._engine.dispose()

    def put(self, revision: Revision, alias: str = "") -> tuple[Revision, bool]:
        """Add `revision` and point `alias`, unless empty, at it. Gives what the catalog holds and whether it is new.

        RESOURCE_EXHAUSTED when the catalog is full.
        """
        target = Alias(revision.adapter_id, alias, revision.revision)
        with self._lock:
            with self._engine.begin() as connection:
                changes: list[Revision | Alias | Deleted] = []
                found = tables.find(connection, revision.adapter_id, revision.revision)
                if found is None:
                    tables.insert(connection, revision)
                    changes.append(revision)
                if alias and tables.point(connection, target) != revision.revision:
                    changes.append(target)
                if changes:
                    self._check_room(connection)
                numbered = tables.number(connection, changes)
            self._publish(numbered)
            return found or revision, found is None

    def get(self, adapter_id: str, revision: str = "", alias: str = "") -> Revision:
        """The revision named, or the one `alias` points at, or the newest. NOT_FOUND says what is missing."""
        with self._lock, self._engine.connect() as connection:
            tables.require_adapter(connection, adapter_id)
            if alias:
                pointed = tables.alias_target(connection, adapter_id, alias)
                if pointed is None:
                    raise tables.no_alias(adapter_id, alias)
                revision = pointed
            found = tables.find(connection, adapter_id, revision)
            if found is None:
                raise tables.no_revision(adapter_id, revision)
            return found

    def snapshot(self, adapter_id: str = "") -> Snapshot:
        """Everything, or with an `adapter_id` what belongs to it."""
        with self._lock, self._engine.connect() as connection:
            return tables.snapshot(connection, adapter_id)

    def set_alias(self, alias: Alias) -> str:
        """Point `alias` at its revision, or with an empty revision remove it. Gives the revision it pointed at before.

        NOT_FOUND when the revision, or the alias to remove, does not exist.
        """
        with self._lock:
            with self._engine.begin() as connection:
                tables.require_adapter(connection, alias.adapter_id)
                previous = tables.point(connection, alias)
                if previous is None and not alias.revision:
                    raise tables.no_alias(alias.adapter_id, alias.alias)
                if previous is None:
                    self._check_room(connection)
                numbered = tables.number(connection, [alias] if previous != alias.revision else [])
            self._publish(numbered)
            return previous or ""

    def delete(self, adapter_id: str, revision: str = "") -> tuple[int, frozenset[str]]:
        """Delete one revision, or with none given the adapter whole, its aliases included.

        Gives the number of revisions deleted and the sha256 of the files that no revision holds any more. NOT_FOUND
        when there is nothing to delete, FAILED_PRECONDITION when an alias points at the one revision.
        """
        with self._lock:
            with self._engine.begin() as connection:
                tables.require_adapter(connection, adapter_id)
                held = tables.snapshot(connection, adapter_id)
                doomed = [r for r in held.revisions if revision in ("", r.revision)]
                if not doomed:
                    raise tables.no_revision(adapter_id, revision)
                pointing = [a for a in held.aliases if revision in ("", a.revision)]
                if revision and pointing:
                    names = quote(", ".join(alias.alias for alias in pointing))
                    raise failed_precondition(
                        "ALIASED", revision, f"aliases of adapter {quote(adapter_id)} point at {revision}: {names}"
                    )
                changes: list[Revision | Alias | Deleted] = [Alias(adapter_id, a.alias, "") for a in pointing]
                changes += [Deleted(adapter_id, r.revision) for r in doomed]
                for change in changes:
                    tables.remove(connection, change)
                digests = {file.sha256 for r in doomed for file in r.files}
                orphans = frozenset(digests - tables.digests(connection, digests))
                numbered = tables.number(connection, changes)
            self._publish(numbered)
            return len(doomed), orphans

    def digests(self, among: Iterable[str] | None = None) -> set[str]:
        """The sha256 of every file that a revision holds, or of those `among` the given."""
        with self._lock, self._engine.connect() as connection:
            return tables.digests(connection, among)

    def attach(self, subscription: Subscription) -> Snapshot:
        """A snapshot; the subscription then carries every change after it. Attaching again begins anew."""
        with self._lock, self._engine.connect() as connection:
            snapshot = tables.snapshot(connection)
            subscription.restart()
            self._subscriptions = [s for s in self._subscriptions if not s.closed and s is not subscription]
            self._subscriptions.append(subscription)
            return snapshot

    def _publish(self, changes: Sequence[Change]) -> None:
        self._subscriptions = [s for s in self._subscriptions if not s.closed]
        for change in changes:
            for subscription in self._subscriptions:
                subscription.offer(change)

    def _check_room(self, connection: Connection) -> None:
        if tables.listed_bytes(connection) > self._max_bytes:
            raise resource_exhausted(
                "max_catalog_bytes",
                f"the catalog is full: its listing would exceed {self._max_bytes} bytes; delete some revisions first",
            )


def _configure_sqlite(connection: Any, _record: object) -> None:
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")
