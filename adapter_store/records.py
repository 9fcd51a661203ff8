"""What the catalog holds and says, in its own words; wire types stop at the servicer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StoredFile:
    name: str
    size: int  # bytes
    sha256: str  # hex


@dataclass(frozen=True)
class Revision:
    """One immutable adapter artefact."""

    adapter_id: str
    revision: str
    files: tuple[StoredFile, ...]
    created_s: float  # seconds since the epoch
    base_model: str
    max_rank: int
    target_modules: tuple[str, ...]
    num_parameters: int

    @property
    def listed_bytes(self) -> int:
        """At least what it takes of a message."""
        texts = (self.adapter_id, self.revision, self.base_model, *self.target_modules)
        return 128 + sum(len(text.encode()) + 4 for text in texts) + sum(len(file.name) + 96 for file in self.files)


@dataclass(frozen=True)
class Alias:
    adapter_id: str
    alias: str
    revision: str  # empty, in a change: the alias was removed

    @property
    def listed_bytes(self) -> int:
        """At least what it takes of a message."""
        return 16 + len(self.adapter_id) + len(self.alias) + len(self.revision)


@dataclass(frozen=True)
class Deleted:
    adapter_id: str
    revision: str


@dataclass(frozen=True)
class Change:
    """The change that made `version` of the catalog."""

    version: int
    what: Revision | Alias | Deleted


@dataclass(frozen=True)
class Snapshot:
    version: int
    revisions: tuple[Revision, ...]  # by adapter id, newest first
    aliases: tuple[Alias, ...]
