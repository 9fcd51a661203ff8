"""The store: blobs and catalog kept in step, so that every revision listed can be fetched and nothing else stays."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from adapter_store.blobs import Blobs, StagedFile
from adapter_store.catalog import Catalog
from adapter_store.records import Revision, StoredFile
from adapter_store.validate import check_file_names, validate
from protos.adapter_format import (
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    TENSORS_FILE,
    check_adapter_id,
    check_alias,
    check_revision,
    revision_digest,
)
from protos.errors import internal, invalid_argument, quote, resource_exhausted, unavailable

log = logging.getLogger(__name__)


class AdapterStore:
    """Every method blocks on disk and database; call them from threads."""

    def __init__(
        self, catalog: Catalog, blobs: Blobs, max_adapter_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        self.catalog = catalog
        self._blobs = blobs
        self._max_adapter_bytes = max_adapter_bytes
        self._clock = clock
        # Held while blobs and catalog change together: a Delete must not take a blob that a Put is about to list.
        self._lock = threading.Lock()
        if swept := blobs.sweep(catalog.digests()):
            log.info("swept files of interrupted uploads", extra={"files": swept})

    def begin_put(self, adapter_id: str, files: Sequence[StoredFile], alias: str) -> Upload:
        """Begin an upload of `files`, whose sha256 may be empty. INVALID_ARGUMENT when it could only be refused."""
        check_adapter_id(adapter_id, "header.adapter_id")
        if alias:
            check_alias(alias, "header.alias")
        check_file_names([file.name for file in files])
        for file in files:
            limit = MAX_CONFIG_BYTES if file.name == CONFIG_FILE else self._max_adapter_bytes
            if file.size > limit:
                raise invalid_argument(file.name, f"{file.size} bytes exceed the limit of {limit}")
        return Upload(self, self._blobs, adapter_id, files, alias)

    def accept(self, adapter_id: str, staged: Sequence[Staged], alias: str) -> tuple[Revision, bool]:
        """Validate complete files and list them as a revision; whether it is new. INVALID_ARGUMENT when invalid."""
        paths = {file.declared.name: file.content.path for file in staged}
        facts = validate(paths[CONFIG_FILE].read_bytes(), paths[TENSORS_FILE])
        files = sorted((f.declared.name, f.content.size, f.content.digest) for f in staged)
        revision = Revision(
            adapter_id=adapter_id,
            revision=revision_digest((name, digest) for name, _, digest in files),
            files=tuple(StoredFile(*file) for file in files),
            created_s=self._clock(),
            base_model=facts.base_model,
            max_rank=facts.max_rank,
            target_modules=facts.target_modules,
            num_parameters=facts.num_parameters,
        )
        if facts.unmatched_patterns:
            log.warning(
                "patterns that match no module",
                extra={"adapter_id": adapter_id, "revision": revision.revision, "patterns": facts.unmatched_patterns},
            )
        with self._lock:
            try:
                for file in staged:
                    self._blobs.keep(file.content)
                return self.catalog.put(revision, alias)
            except BaseException:
                digests = {file.sha256 for file in revision.files}
                self._blobs.delete(digests - self.catalog.digests(digests))
                raise

    def open(self, adapter_id: str, revision: str) -> tuple[Revision, list[BinaryIO]]:
        """The revision and its open files, in its order, readable even if it is deleted meanwhile. Close them."""
        check_revision(revision, "ref.revision")
        with self._lock, contextlib.ExitStack() as opened:
            found = self.catalog.get(adapter_id, revision)
            try:
                files = [opened.enter_context(self._blobs.open(file.sha256)) for file in found.files]
            except FileNotFoundError as error:
                raise internal(f"a file of {quote(adapter_id)} {found.revision} is gone from the store") from error
            opened.pop_all()
            return found, files

    def delete(self, adapter_id: str, revision: str) -> int:
        """As `Catalog.delete`, with the files that nothing holds any more. The number of revisions deleted."""
        with self._lock:
            count, orphans = self.catalog.delete(adapter_id, revision)
            self._blobs.delete(orphans)
            return count

    def close(self) -> None:
        self.catalog.close()
        self._blobs.close()


@dataclass(frozen=True)
class Staged:
    declared: StoredFile
    content: StagedFile


class Upload:
    """The files of one Put as they arrive. Ends with `commit` or `discard`; discarding after either does nothing."""

    def __init__(
        self, store: AdapterStore, blobs: Blobs, adapter_id: str, files: Sequence[StoredFile], alias: str
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._adapter_id = adapter_id
        self._alias = alias
        # A cancelled call discards while a thread may still be writing.
        self._lock = threading.Lock()
        self._declared = files
        self._staged: list[Staged] = []
        self._position = 0
        self._ended = False

    def write(self, chunk: bytes) -> None:
        """The next bytes, of one file only. INVALID_ARGUMENT naming the file when they exceed its size."""
        with self._lock, _disk_space():
            self._stage()
            while chunk and self._position < len(self._staged):
                file = self._staged[self._position]
                if missing := file.declared.size - file.content.size:
                    if len(chunk) > missing:
                        raise invalid_argument(
                            file.declared.name, f"the chunk exceeds the {file.declared.size} bytes its header says"
                        )
                    file.content.write(chunk)
                    return
                self._position += 1
            if chunk:
                raise invalid_argument("chunk", "bytes beyond the last file of the header")

    def commit(self) -> tuple[Revision, bool]:
        """Validate and accept. INVALID_ARGUMENT naming the file when bytes are missing, differ, or are no adapter."""
        with self._lock, _disk_space():
            self._stage()
            for file in self._staged:
                if file.content.size != file.declared.size:
                    raise invalid_argument(
                        file.declared.name, f"ended after {file.content.size} of {file.declared.size} bytes"
                    )
                if file.declared.sha256 and file.declared.sha256 != file.content.digest:
                    raise invalid_argument(
                        file.declared.name,
                        f"its sha256 is {file.content.digest}, its header says {quote(file.declared.sha256)}",
                    )
                file.content.sync()
            return self._store.accept(self._adapter_id, self._staged, self._alias)

    def discard(self) -> None:
        with self._lock:
            self._ended = True
            for file in self._staged:
                file.content.discard()

    def _stage(self) -> None:
        if self._ended:
            raise unavailable("the upload has ended")
        for file in self._declared[len(self._staged) :]:
            self._staged.append(Staged(file, self._blobs.stage()))


@contextlib.contextmanager
def _disk_space() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise resource_exhausted("disk", "the store's disk is full") from error
        raise
