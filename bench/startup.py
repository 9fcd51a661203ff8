"""How long a model server takes from its start until it answers, its files already in memory."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.session import Options
from loramux.service_process import ServiceProcess

MUST_S, DREAM_S = 10.0, 4.0
_TIMEOUT_S = 600.0
_PREFIX = "LORAMUX_MODEL_SERVER_"
_ROOT = Path(__file__).resolve().parents[1]


def seconds_until_ready(options: Options, *, repeats: int, say: Callable[[str], None]) -> list[float]:
    """From the start of the process to health SERVING, each repeat. One start before them is not counted: it brings the
    files into memory and builds the native kernels where they are missing. Raises LaunchError."""
    settings = {"model": options.model, "dtype": options.dtype, "device": options.device, **options.settings}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_PREFIX)}
    environment |= {f"{_PREFIX}{name.upper()}": value for name, value in settings.items()}
    environment |= {f"{_PREFIX}LISTEN": "127.0.0.1:0", "PYTHONPATH": str(_ROOT), "PYTHONUNBUFFERED": "1"}
    times_s = []
    with tempfile.TemporaryDirectory() as directory:
        for repeat in range(repeats + 1):
            say(f"model server, start {repeat} of {repeats}")
            command = [sys.executable, "-m", "model_server"]
            process = ServiceProcess("model-server", command, environment, Path(directory))
            started_s = time.monotonic()
            process.start()
            try:
                process.wait_serving(_TIMEOUT_S)
                times_s.append(time.monotonic() - started_s)
            finally:
                process.stop(10.0)
    return times_s[1:]
