"""`python -m gateway`: configured by LORAMUX_GATEWAY_* (config.py), stopped by SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio

from gateway.app import Gateway
from gateway.config import GatewayConfig
from observability.telemetry import setup


async def serve(config: GatewayConfig) -> None:
    gateway = Gateway(config)
    await gateway.start()
    await gateway.run()


def main() -> None:
    config = GatewayConfig()
    telemetry = setup("gateway", otlp_endpoint=config.otlp_endpoint, log_level=config.log_level)
    try:
        asyncio.run(serve(config))
    finally:
        telemetry.shutdown()


if __name__ == "__main__":
    main()
