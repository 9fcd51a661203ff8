"""The committed stubs are what `make protos` makes of the committed .proto files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUTPUTS = ["--python_out", "--grpc_python_out", "--mypy_out", "--mypy_grpc_out"]


def test_stubs_are_up_to_date(tmp_path: Path) -> None:
    sources = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "protos").glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *(f"{flag}={tmp_path}" for flag in OUTPUTS), *sources]
    # The mypy plugins stand beside the interpreter.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "PATH": path}, timeout=60)
    made = {file.name: file.read_text() for file in (tmp_path / "protos").iterdir()}
    committed = {file.name: file.read_text() for file in (ROOT / "protos").glob("*_pb2*.py*")}
    assert sorted(made) == sorted(committed)
    stale = [name for name, text in made.items() if committed[name] != text]
    assert not stale, f"run `make protos`: {stale}"
