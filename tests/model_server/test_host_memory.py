"""Available memory, on files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_server.host_memory import available_bytes

GIB = 2**30


def kernel(root: Path, membership: str = "0::/\n", available_kib: int = 8 * 2**20) -> Path:
    files = {
        "proc/meminfo": f"MemTotal:  16777216 kB\nMemFree:  1 kB\nMemAvailable:  {available_kib} kB\n",
        "proc/self/cgroup": membership,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(root: Path, path: str, limit: int | None, used: int, inactive_file: int = 0) -> None:
    directory = root / "sys/fs/cgroup" / path
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text("max\n" if limit is None else f"{limit}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\nactive_file 7\n")


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert available_bytes(kernel(tmp_path)) == 8 * GIB
    group(tmp_path, "", None, 3 * GIB)
    assert available_bytes(tmp_path) == 8 * GIB


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    group(kernel(tmp_path), "", 4 * GIB, 3 * GIB)
    assert available_bytes(tmp_path) == GIB
    # The limit is no promise: where the machine has less, there is less.
    assert available_bytes(kernel(tmp_path, available_kib=1024)) == 2**20


def test_file_cache_can_be_taken_back(tmp_path: Path) -> None:
    group(kernel(tmp_path), "", 4 * GIB, 4 * GIB, inactive_file=2 * GIB)
    assert available_bytes(tmp_path) == 2 * GIB


def test_the_tightest_group_above_counts(tmp_path: Path) -> None:
    root = kernel(tmp_path, "1:name=systemd:/elsewhere\n0::/outer/inner\n")
    group(root, "outer/inner", 6 * GIB, GIB)
    assert available_bytes(root) == 5 * GIB
    group(root, "outer", 4 * GIB, GIB)
    assert available_bytes(root) == 3 * GIB


def test_a_path_of_the_host_seen_from_a_container(tmp_path: Path) -> None:
    root = kernel(tmp_path, "0::/machine/not/mounted/here\n")
    group(root, "", 4 * GIB, GIB)
    assert available_bytes(root) == 3 * GIB


def test_over_its_limit_there_is_nothing(tmp_path: Path) -> None:
    group(kernel(tmp_path), "", GIB, 2 * GIB)
    assert available_bytes(tmp_path) == 0


def test_a_machine_that_does_not_tell(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        available_bytes(tmp_path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1 kB\n")
    with pytest.raises(ValueError, match="MemAvailable"):
        available_bytes(tmp_path)
