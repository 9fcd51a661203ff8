"""Files by content: whole or not there, and nothing left behind."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from adapter_store.blobs import Blobs


def keep(blobs: Blobs, data: bytes) -> str:
    staged = blobs.stage()
    staged.write(data[:3])
    staged.write(data[3:])
    staged.sync()
    blobs.keep(staged)
    return staged.digest


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()} - {"lock"}


def test_a_kept_file_is_found_by_its_sha256(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    digest = keep(blobs, b"hello")
    assert digest == sha256(b"hello").hexdigest()
    with blobs.open(digest) as file:
        assert file.read() == b"hello"
    assert keep(blobs, b"hello") == digest
    assert names(tmp_path) == {digest}


def test_a_staged_file_is_not_readable_and_leaves_nothing_when_discarded(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    staged = blobs.stage()
    staged.write(b"hello")
    with pytest.raises(FileNotFoundError):
        blobs.open(staged.digest)
    staged.discard()
    staged.discard()
    assert names(tmp_path) == set()


def test_an_open_file_outlives_its_deletion(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    digest = keep(blobs, b"hello")
    with blobs.open(digest) as file:
        blobs.delete([digest, "0" * 64])
        assert file.read() == b"hello"
    assert names(tmp_path) == set()


def test_sweeping_removes_what_an_interrupted_process_left(tmp_path: Path) -> None:  # FIL-11
    blobs = Blobs(tmp_path)
    used, orphan = keep(blobs, b"used"), keep(blobs, b"orphan")
    blobs.stage().write(b"half")
    blobs.close()
    blobs = Blobs(tmp_path)
    assert blobs.sweep({used}) == 2
    assert orphan not in names(tmp_path) and names(tmp_path) == {used}


def test_one_folder_has_one_owner(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    with pytest.raises(OSError, match="another adapter store"):
        Blobs(tmp_path)
    blobs.close()
    Blobs(tmp_path).close()
