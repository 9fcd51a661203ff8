"""`python -m model_server`: configuration → telemetry → serve."""

from __future__ import annotations

import asyncio
import os
import sys

from model_server.config import ENGINE_ENVIRONMENT, Config
from model_server.server import serve
from observability import telemetry


def main() -> int:
    os.environ.update(ENGINE_ENVIRONMENT | os.environ)
    config = Config()
    handle = telemetry.setup("model_server", otlp_endpoint=config.otlp_endpoint, log_level=config.log_level)
    try:
        return asyncio.run(serve(config))
    finally:
        handle.shutdown()


if __name__ == "__main__":
    sys.exit(main())
