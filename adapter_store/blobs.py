"""Files by content: a local folder where a file's name is the sha256 of its bytes, and a file is there whole or not."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Collection
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4


class StagedFile:
    """A file being written, invisible to readers until `Blobs.keep` takes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._file: BinaryIO = path.open("xb")
        self._hash = sha256()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def sync(self) -> None:
        """Bring the bytes to the disk; no write may follow."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # closing flushes, which a full disk refuses
            self._file.close()
        self.path.unlink(missing_ok=True)


class Blobs:
    """The folder. One process owns it at a time; which blobs are in use is the catalog's to say."""

    def __init__(self, folder: Path) -> None:
        """Take `folder`, made if absent. Raises OSError when another process has it."""
        self._kept, self._incoming = folder / "blobs", folder / "incoming"
        for path in (self._kept, self._incoming):
            path.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise OSError(f"another adapter store is using {folder}") from error

    def close(self) -> None:
        self._lock.close()

    def stage(self) -> StagedFile:
        return StagedFile(self._incoming / uuid4().hex)

    def keep(self, staged: StagedFile) -> None:
        """Make a synced file readable under its digest, atomically and durably."""
        staged.path.replace(self._kept / staged.digest)
        descriptor = os.open(self._kept, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def open(self, digest: str) -> BinaryIO:
        """Readable to its end even when the blob is deleted meanwhile. Raises FileNotFoundError."""
        return (self._kept / digest).open("rb")

    def delete(self, digests: Collection[str]) -> None:
        for digest in digests:
            (self._kept / digest).unlink(missing_ok=True)

    def sweep(self, in_use: Collection[str]) -> int:
        """Delete what an interrupted process left behind; how many files that were. Only before the first upload."""
        left = [path for path in self._kept.iterdir() if path.name not in in_use]
        left += self._incoming.iterdir()
        for path in left:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        return len(left)
