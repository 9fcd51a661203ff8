"""How the native library comes about: once, by one of many processes; and what happens where it cannot."""

from __future__ import annotations

import ctypes
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels.cpu import build


def test_many_at_once_build_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "one.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(build, "_SOURCES", tmp_path / "native")
    compiled = []
    compile_library = build._compile
    monkeypatch.setattr(build, "_compile", lambda *args: (compiled.append(args), compile_library(*args)))
    with ThreadPoolExecutor(4) as threads:
        paths = {future.result() for future in [threads.submit(build.build, tmp_path / "cache") for _ in range(4)]}
    assert len(paths) == len(compiled) == 1
    assert ctypes.CDLL(str(paths.pop())).answer() == 42
    (tmp_path / "native" / "one.cpp").write_text('extern "C" int answer() { return 43; }\n')
    assert ctypes.CDLL(str(build.build(tmp_path / "cache"))).answer() == 43
    assert not list((tmp_path / "cache").glob("*.tmp"))


@pytest.mark.parametrize("fault", ["no compiler", "broken source", "no directory", "no home"])
def test_without_a_library_one_line_says_why(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if fault == "no compiler":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    elif fault == "no directory":
        (tmp_path / "cache").write_text("a file is in the way")
    else:
        (tmp_path / "native").mkdir()
        (tmp_path / "native" / "one.cpp").write_text("this is not C++\n")
        monkeypatch.setattr(build, "_SOURCES", tmp_path / "native")
    with caplog.at_level(logging.WARNING):
        cache = Path("~no-such-user/cache") if fault == "no home" else tmp_path / "cache"
        assert build.load(cache) is None
    assert len(caplog.records) == 1 and "plain torch is used instead" in caplog.text
