"""What a local stack is made of; the one place of this package that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

GATEWAY_PORT = 50051
MODEL_SERVER_PORT = 50061
ADAPTER_STORE_PORT = 50071
DATA_DIR = Path("~/.local/share/loramux")


@dataclass(frozen=True, slots=True)
class StackConfig:
    """Ports of 0 let each service take a free one; model server i listens on `model_server_port` + i otherwise."""

    data_dir: Path
    model: str = "smollm2"  # or the path of a Hugging Face directory or a .gguf file
    replicas: int = 1
    host: str = "127.0.0.1"
    gateway_port: int = 0
    model_server_port: int = 0
    adapter_store_port: int = 0
    start_timeout_s: float = 300.0
    # Settings for the services beyond what the launcher decides, by the names of README.md's table.
    settings: Mapping[str, str] = field(default_factory=dict)
    inherited: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)
