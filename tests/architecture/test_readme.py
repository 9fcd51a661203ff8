"""README.md says what is there: each setting, each target of the Makefile it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic_settings import BaseSettings

from adapter_store.config import Settings
from gateway.config import GatewayConfig
from model_server.config import Config

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SHARED = {"log_level": "LORAMUX_LOG_LEVEL", "otlp_endpoint": "OTEL_EXPORTER_OTLP_ENDPOINT"}


@pytest.mark.parametrize("config", [GatewayConfig, Config, Settings])
def test_configuration_table_is_complete_and_true(config: type[BaseSettings]) -> None:
    prefix = config.model_config["env_prefix"]
    documented = set(re.findall(rf"^\| `({prefix}\w+)`", README, re.MULTILINE))
    assert documented == {prefix + name.upper() for name in config.model_fields if name not in SHARED}
    assert all(f"| `{name}` |" in README for name in SHARED.values())


def test_targets_it_names_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= targets
