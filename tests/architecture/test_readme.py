"""README.md says what is there: each setting, each target of the Makefile it names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("config", [GatewayConfig, Config, Settings])
def test_defaults_it_tells_are_the_defaults(config: type[BaseSettings]) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*?) ?\|", README, re.MULTILINE))
    for name, field in config.model_fields.items():
        if name not in SHARED:
            told = rows[config.model_config["env_prefix"] + name.upper()].strip("`")
            assert _value(told) == _text(field.default), name


def _value(told: str) -> str:
    match = re.fullmatch(r"(\d+) (GiB|MB)", told)
    return told if match is None else str(int(match[1]) * {"GiB": 2**30, "MB": 10**6}[match[2]])


def _text(default: Any) -> str:
    if default is None:
        return ""
    if isinstance(default, tuple):
        return ",".join(default)
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def test_targets_it_names_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= targets
