"""`python -m model_server`: configuration → telemetry → serve."""

from __future__ import annotations

import asyncio
import sys

from model_server.config import Config
from model_server.server import serve
from observability import telemetry


def main() -> int:
    config = Config()
    handle = telemetry.setup("model_server", otlp_endpoint=config.otlp_endpoint, log_level=config.log_level)
    try:
        return asyncio.run(serve(config))
    finally:
        handle.shutdown()


if __name__ == "__main__":
    sys.exit(main())
