"""How much memory this process may still take, as the kernel and its cgroup (version 2) tell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int:
    """The smaller of what the machine has available and what the cgroups leave of their limits.

    `root` is where /proc and /sys are. Raises OSError or ValueError where /proc/meminfo cannot be read or understood.
    """
    return min([_machine_bytes(root / "proc/meminfo"), *_cgroup_bytes(root)])


def _machine_bytes(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ValueError(f"{meminfo}: no MemAvailable")


def _cgroup_bytes(root: Path) -> Iterator[int]:
    """What each cgroup from this process's own up to the topmost leaves, where it has a limit."""
    top = root / "sys/fs/cgroup"
    membership = root / "proc/self/cgroup"
    lines = membership.read_text().splitlines() if membership.exists() else []
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    group = top / own.lstrip("/")
    # Inside a container its path may be the host's; what is mounted as the top is then its own group.
    for directory in (group, *(parent for parent in group.parents if parent.is_relative_to(top))):
        limit_file = directory / "memory.max"
        if not limit_file.exists() or (limit := limit_file.read_text().strip()) == "max":
            continue
        used = int((directory / "memory.current").read_text())
        yield max(0, int(limit) - max(0, used - _reclaimable_bytes(directory / "memory.stat")))


def _reclaimable_bytes(stat: Path) -> int:
    """File cache that nobody has used lately: counted as use (the weights just read, say), given back when asked for."""
    for line in stat.read_text().splitlines() if stat.exists() else ():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return 0
