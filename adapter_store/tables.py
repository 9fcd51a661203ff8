"""The catalog's tables and the statements on them. Portable SQL: SQLite today, PostgreSQL by URL."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from adapter_store.records import Alias, Change, Deleted, Revision, Snapshot, StoredFile
from protos.errors import ServiceError, not_found, quote

metadata = sa.MetaData()

# Ids only grow: the newest revision of an adapter is the one with the greatest id.
revisions = sa.Table(
    "revisions",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("adapter_id", sa.String(128), nullable=False),
    sa.Column("revision", sa.String(71), nullable=False),
    sa.Column("created_s", sa.Double, nullable=False),
    sa.Column("base_model", sa.String, nullable=False),
    sa.Column("max_rank", sa.Integer, nullable=False),
    sa.Column("target_modules", sa.JSON, nullable=False),
    sa.Column("num_parameters", sa.BigInteger, nullable=False),
    sa.Column("listed_bytes", sa.Integer, nullable=False),
    sa.UniqueConstraint("adapter_id", "revision"),
    sqlite_autoincrement=True,
)

files = sa.Table(
    "files",
    metadata,
    sa.Column("revision_id", sa.ForeignKey("revisions.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("position", sa.Integer, primary_key=True),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("sha256", sa.String(64), nullable=False, index=True),
)

# No cascade: deleting a revision that an alias points at must fail, whoever tries.
aliases = sa.Table(
    "aliases",
    metadata,
    sa.Column("adapter_id", sa.String(128), primary_key=True),
    sa.Column("alias", sa.String(128), primary_key=True),
    sa.Column("revision_id", sa.ForeignKey("revisions.id"), nullable=False),
    sa.Column("listed_bytes", sa.Integer, nullable=False),
)

# One row: the number of changes the catalog has seen.
version = sa.Table("version", metadata, sa.Column("version", sa.BigInteger, nullable=False))


def no_revision(adapter_id: str, revision: str) -> ServiceError:
    return not_found("revision", revision, f"adapter {quote(adapter_id)} has no revision {quote(revision)}")


def no_alias(adapter_id: str, alias: str) -> ServiceError:
    return not_found("alias", alias, f"adapter {quote(adapter_id)} has no alias {quote(alias)}")


def require_adapter(connection: Connection, adapter_id: str) -> None:
    if connection.scalar(sa.select(revisions.c.id).where(revisions.c.adapter_id == adapter_id).limit(1)) is None:
        raise not_found("adapter", adapter_id, f"there is no adapter {quote(adapter_id)}")


def snapshot(connection: Connection, adapter_id: str = "") -> Snapshot:
    mine = revisions.c.adapter_id == adapter_id if adapter_id else sa.true()
    return Snapshot(
        version=connection.scalars(sa.select(version.c.version)).one(),
        revisions=tuple(_read(connection, mine)),
        aliases=tuple(
            Alias(row.adapter_id, row.alias, row.revision)
            for row in connection.execute(
                sa.select(revisions.c.adapter_id, aliases.c.alias, revisions.c.revision)
                .join(revisions, revisions.c.id == aliases.c.revision_id)
                .where(mine)
                .order_by(revisions.c.adapter_id, aliases.c.alias)
            )
        ),
    )


def find(connection: Connection, adapter_id: str, revision: str) -> Revision | None:
    """The revision, with an empty one the newest."""
    mine = revisions.c.adapter_id == adapter_id
    if revision:
        mine &= revisions.c.revision == revision
    else:
        newest = sa.select(sa.func.max(revisions.c.id)).where(mine).scalar_subquery()
        mine = revisions.c.id == newest
    return next(_read(connection, mine), None)


def _read(connection: Connection, where: sa.ColumnElement[bool]) -> Iterator[Revision]:
    held: dict[int, list[StoredFile]] = {}
    chosen = sa.select(revisions.c.id).where(where)
    for row in connection.execute(sa.select(files).where(files.c.revision_id.in_(chosen)).order_by(files.c.position)):
        held.setdefault(row.revision_id, []).append(StoredFile(row.name, row.size, row.sha256))
    for row in connection.execute(
        sa.select(revisions).where(where).order_by(revisions.c.adapter_id, revisions.c.id.desc())
    ):
        yield Revision(
            adapter_id=row.adapter_id,
            revision=row.revision,
            files=tuple(held[row.id]),
            created_s=row.created_s,
            base_model=row.base_model,
            max_rank=row.max_rank,
            target_modules=tuple(row.target_modules),
            num_parameters=row.num_parameters,
        )


def insert(connection: Connection, revision: Revision) -> None:
    row_id = connection.scalars(
        sa.insert(revisions)
        .values(
            adapter_id=revision.adapter_id,
            revision=revision.revision,
            created_s=revision.created_s,
            base_model=revision.base_model,
            max_rank=revision.max_rank,
            target_modules=list(revision.target_modules),
            num_parameters=revision.num_parameters,
            listed_bytes=revision.listed_bytes,
        )
        .returning(revisions.c.id)
    ).one()
    connection.execute(
        sa.insert(files),
        [
            {"revision_id": row_id, "position": position, "name": file.name, "size": file.size, "sha256": file.sha256}
            for position, file in enumerate(revision.files)
        ],
    )


def start_numbering(connection: Connection) -> None:
    if connection.scalar(sa.select(version.c.version)) is None:
        connection.execute(sa.insert(version).values(version=0))


def listed_bytes(connection: Connection) -> int:
    """At least what a snapshot takes of a message."""
    sums = (sa.select(sa.func.coalesce(sa.func.sum(t.c.listed_bytes), 0)) for t in (revisions, aliases))
    return sum(connection.scalars(total).one() for total in sums)


def alias_target(connection: Connection, adapter_id: str, alias: str) -> str | None:
    return connection.scalar(
        sa.select(revisions.c.revision)
        .join(aliases, aliases.c.revision_id == revisions.c.id)
        .where(aliases.c.adapter_id == adapter_id, aliases.c.alias == alias)
    )


def point(connection: Connection, alias: Alias) -> str | None:
    """Set or remove `alias`; the revision it pointed at before. NOT_FOUND when there is no such revision."""
    previous = alias_target(connection, alias.adapter_id, alias.alias)
    if previous is not None:
        remove(connection, alias)
    if alias.revision:
        row_id = connection.scalar(sa.select(revisions.c.id).where(_is(alias.adapter_id, alias.revision)))
        if row_id is None:
            raise no_revision(alias.adapter_id, alias.revision)
        connection.execute(
            sa.insert(aliases).values(
                adapter_id=alias.adapter_id, alias=alias.alias, revision_id=row_id, listed_bytes=alias.listed_bytes
            )
        )
    return previous


def remove(connection: Connection, what: Revision | Alias | Deleted) -> None:
    if isinstance(what, Alias):
        connection.execute(
            sa.delete(aliases).where(aliases.c.adapter_id == what.adapter_id, aliases.c.alias == what.alias)
        )
    else:
        connection.execute(sa.delete(revisions).where(_is(what.adapter_id, what.revision)))


def _is(adapter_id: str, revision: str) -> sa.ColumnElement[bool]:
    return sa.and_(revisions.c.adapter_id == adapter_id, revisions.c.revision == revision)


def digests(connection: Connection, among: Iterable[str] | None) -> set[str]:
    query = sa.select(files.c.sha256).distinct()
    return set(connection.scalars(query if among is None else query.where(files.c.sha256.in_(list(among)))))


def number(connection: Connection, changes: Sequence[Revision | Alias | Deleted]) -> list[Change]:
    """Give the changes the versions that follow the catalog's, and the catalog the last of them."""
    before = connection.scalars(sa.select(version.c.version)).one()
    connection.execute(sa.update(version).values(version=before + len(changes)))
    return [Change(before + 1 + index, change) for index, change in enumerate(changes)]
