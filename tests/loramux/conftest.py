from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loramux.scripted import ScriptedServer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


@pytest.fixture
def adapter_dir(tmp_path: Path) -> Path:
    """A directory that looks as PEFT saves one, weights larger than one chunk."""
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (directory / "adapter_model.safetensors").write_bytes(b"\x01" * (1024 * 1024 + 7))
    (directory / "README.md").write_text("not uploaded")
    return directory
