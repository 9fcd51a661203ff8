"""`python -m model_server`: configuration → telemetry → serve."""

from __future__ import annotations

import asyncio
import os
import sys

from model_server.config import Config
from model_server.server import serve
from observability import telemetry


def main() -> int:
    # For the engine's process, which is born with this environment: threads that wait sleep instead of spinning, since they
    # share their cores with gRPC and the gateway (a step took two to four times as long there), and weights lie in huge pages.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    config = Config()
    handle = telemetry.setup("model_server", otlp_endpoint=config.otlp_endpoint, log_level=config.log_level)
    try:
        return asyncio.run(serve(config))
    finally:
        handle.shutdown()


if __name__ == "__main__":
    sys.exit(main())
