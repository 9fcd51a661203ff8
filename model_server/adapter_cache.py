"""Adapters on local disk, by revision: fetched from the store once, verified against their digest, bounded in bytes.

Lives in the serving process: network and hashing stay away from the engine. A revision's directory appears by an atomic
rename once it is verified and on disk, so what is there is whole. Model servers may share the directory: a revision's lock
file is held shared by whoever reads it, and alone by whoever fetches or deletes it, so each is fetched once per node.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from model_server import adapter_fetch
from model_server.request import AdapterRef
from observability import logs
from protos import adapter_format, errors
from protos.adapter_store_pb2_grpc import AdapterStoreStub

log = logs.get(__name__)

_LOCK_RETRY_S: Final = 0.05
_TEMPORARY: Final = ("fetching-", "evicting-")


class _Lock:
    """A lock on one revision, between servers and within one alike. Lock files stay: deleting one would split its holders."""

    def __init__(self, path: Path, operation: int) -> None:
        """`operation` as for flock; raises BlockingIOError with LOCK_NB when another holds it."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, operation)
        except BaseException:
            os.close(self._file)
            raise

    def release(self) -> None:
        os.close(self._file)


class AdapterCache:
    """`ensure` or a successful `find`, and `release`, belong together: a directory in use is not deleted.

    How many fetches go on at a time is the caller's to decide."""

    def __init__(self, directory: Path, limit_bytes: int, store: AdapterStoreStub | None) -> None:
        self._directory = directory / "adapters"
        self._limit_bytes = limit_bytes
        self._store = store
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._held: dict[str, list[_Lock]] = {}
        self._directory.mkdir(parents=True, exist_ok=True)
        # What an interrupted fetch or deletion left behind, unless another server is at it.
        for prefix in _TEMPORARY:
            for stale in self._directory.glob(f"{prefix}*"):
                with contextlib.suppress(BlockingIOError), self._alone(stale.name.split(".")[0].removeprefix(prefix)):
                    shutil.rmtree(stale, ignore_errors=True)

    async def ensure(self, ref: AdapterRef) -> Path:
        """The directory with the adapter's files; fetched first where it is missing, once for all who ask.

        Raises ServiceError: what the store reported, or UNAVAILABLE when it cannot be reached or sent wrong bytes.
        """
        name = _name(ref)
        while (path := await self.find(ref)) is None:
            fetch = self._fetches.get(name)
            if fetch is None:
                fetch = self._fetches[name] = asyncio.create_task(self._fetch(ref, name))
                fetch.add_done_callback(lambda _: self._fetches.pop(name))
            await asyncio.shield(fetch)
        return path

    async def find(self, ref: AdapterRef) -> Path | None:
        """The directory with the adapter's files, if it is there."""
        name = _name(ref)
        lock = await self._lock(name, fcntl.LOCK_SH, there=True)
        if lock is None:
            return None
        with contextlib.suppress(OSError):
            os.utime(self._directory / name)  # used now: deleted later
        self._held.setdefault(name, []).append(lock)
        return self._directory / name

    def release(self, ref: AdapterRef, readable: bool = True) -> None:
        """Done with the files. Not `readable`: they are damaged, and are fetched anew when next asked for."""
        name = _name(ref)
        self._held[name].pop().release()
        if not self._held[name]:
            del self._held[name]
        if not readable:
            try:
                self._delete(name)
            except BlockingIOError:
                pass  # who reads it as well will find the same
            except OSError:
                log.exception("adapter_not_discarded", adapter_id=ref.adapter_id, revision=ref.revision)

    async def _lock(self, name: str, operation: int, *, there: bool) -> _Lock | None:
        """None once the revision is not `there`, or is although it should not be.

        Waits on no thread: those are few, and who holds the lock may need one to get done. Who is cancelled here holds none.
        """
        path = self._directory / name
        while path.is_dir() == there:
            try:
                lock = _Lock(self._lock_path(name), operation | fcntl.LOCK_NB)
            except BlockingIOError:
                await asyncio.sleep(_LOCK_RETRY_S)
                continue
            if path.is_dir() == there:
                return lock
            lock.release()  # what became of it before it was ours
        return None

    async def _fetch(self, ref: AdapterRef, name: str) -> None:
        if self._store is None:
            raise errors.failed_precondition("adapter_store", ref.adapter_id, "this model server has no adapter store")
        self._directory.mkdir(parents=True, exist_ok=True)  # somebody may have cleared the cache
        lock = await self._lock(name, fcntl.LOCK_EX, there=False)
        if lock is None:
            return  # another server was faster
        try:
            temporary = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix=f"fetching-{name}.", dir=self._directory))
            try:
                await adapter_fetch.fetch(self._store, ref, temporary)
                await asyncio.to_thread(self._keep, temporary, name)
            finally:
                await asyncio.to_thread(shutil.rmtree, temporary, ignore_errors=True)
        finally:
            lock.release()
        log.info("adapter_fetched", adapter_id=ref.adapter_id, revision=ref.revision)

    def _keep(self, complete: Path, name: str) -> None:
        for path in (*complete.iterdir(), complete):
            file = os.open(path, os.O_RDONLY)
            try:
                os.fsync(file)
            finally:
                os.close(file)
        self._make_room(_num_bytes(complete))
        complete.rename(self._directory / name)

    def _make_room(self, num_bytes: int) -> None:
        """Delete revisions nobody holds, least recently used first, until `num_bytes` more fit."""
        entries = []
        for path in self._directory.glob("sha256-*[0-9a-f]"):
            with contextlib.suppress(OSError):  # another server deletes it
                entries.append((path.stat().st_mtime, path.name, _num_bytes(path)))
        total = num_bytes + sum(size for _, _, size in entries)
        for _, name, size in sorted(entries):
            if total <= self._limit_bytes:
                break
            with contextlib.suppress(OSError):  # in use, or the disk refuses: it stays
                self._delete(name)
                total -= size

    def _delete(self, name: str) -> None:
        """Raises BlockingIOError while somebody holds it."""
        with self._alone(name):
            # A new name each time: of an earlier deletion something may be left.
            doomed = tempfile.mkdtemp(prefix=f"evicting-{name}.", dir=self._directory)
            try:
                with contextlib.suppress(FileNotFoundError):
                    (self._directory / name).rename(doomed)
            finally:
                shutil.rmtree(doomed, ignore_errors=True)

    def _lock_path(self, name: str) -> Path:
        return self._directory / f"{name}.lock"

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Raises BlockingIOError while somebody holds it."""
        lock = _Lock(self._lock_path(name), fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            lock.release()


def _name(ref: AdapterRef) -> str:
    return adapter_format.check_revision(ref.revision).replace(":", "-")


def _num_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())
