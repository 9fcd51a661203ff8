"""Builds native/*.cpp into one shared library at first use and keeps it in the user's cache. `python -m kernels.cpu.build`
does so ahead of time.

The library takes pointers and numbers only: it knows neither Python nor torch, compiles in seconds, and shares torch's
OpenMP threads because both ask for the same libgomp.so.1.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

CACHE_DIR = Path("~/.cache/loramux/kernels")
_LOG = logging.getLogger(__name__)
_SOURCES = Path(__file__).parent / "native"
# Not clang++, which c++ may be: its OpenMP would be a second pool of threads beside torch's.
_COMPILER = "g++"
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
_TIMEOUT_S = 600.0


class BuildError(Exception):
    """No library: the message says why."""


@functools.cache
def load(cache_dir: Path = CACHE_DIR) -> ctypes.CDLL | None:
    """The library, built if need be; None, with one line in the log, where it cannot be."""
    try:
        return ctypes.CDLL(str(build(cache_dir)))
    except (BuildError, OSError) as error:
        _LOG.warning("native CPU kernels are not available, plain torch is used instead: %s", error)
        return None


def build(cache_dir: Path = CACHE_DIR) -> Path:
    """The library's path, compiled unless it is there for these sources, compiler and CPU. Safe in many processes at
    once: one builds, the others wait. Raises BuildError or OSError."""
    compiler = shutil.which(_COMPILER)
    if compiler is None:
        raise BuildError(f"no C++ compiler ({_COMPILER})")
    try:
        cache_dir = cache_dir.expanduser()
    except RuntimeError as error:  # a user without a home
        raise BuildError(f"{cache_dir}: {error}") from error
    library = cache_dir / f"cpu-{_key(compiler)}.so"
    if library.exists():
        return library
    cache_dir.mkdir(parents=True, exist_ok=True)
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(compiler, library)
    return library


def _compile(compiler: str, library: Path) -> None:
    started_s = time.monotonic()
    unfinished = library.with_suffix(f".{os.getpid()}.tmp")
    command = [compiler, *_FLAGS, "-o", str(unfinished), *map(str, sorted(_SOURCES.glob("*.cpp")))]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if result.returncode != 0:
            raise BuildError(f"{compiler} failed: {result.stderr.strip()[-500:]}")
        unfinished.replace(library)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{compiler} took more than {_TIMEOUT_S:.0f} s") from None
    finally:
        unfinished.unlink(missing_ok=True)
    _LOG.info("built native CPU kernels in %.1f s: %s", time.monotonic() - started_s, library)


def _key(compiler: str) -> str:
    """Changes with whatever changes the library: sources, flags, compiler, and the CPU that -march=native means."""
    digest = hashlib.sha256(repr((_FLAGS, compiler, Path(compiler).stat().st_mtime_ns, _cpu())).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


if __name__ == "__main__":
    try:
        print(build())
    except (BuildError, OSError) as error:
        sys.exit(f"not built: {error}")
