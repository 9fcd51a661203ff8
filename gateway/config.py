"""The gateway's settings, read from the environment once."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict


class GatewayConfig(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="LORAMUX_GATEWAY_", populate_by_name=True, frozen=True)

    listen: str = "127.0.0.1:50051"
    adapter_store: str = "localhost:50071"
    replicas: Annotated[tuple[str, ...], NoDecode] = ("localhost:50061",)  # comma-separated in the environment
    api_keys: dict[str, str] = {}  # key to tenant; empty: open to all, tenant "anonymous"
    queue_limit: int = Field(default=1024, ge=1)
    promote_after_s: float = Field(default=5.0, gt=0)  # each such wait moves a request one priority class up
    max_outstanding: int = Field(default=256, ge=1)  # requests at one replica at a time; the rest wait here
    replica_wait_s: float = Field(default=30.0, gt=0)  # how long a request waits while no replica is ready
    max_attempts: int = Field(default=3, ge=1)  # replicas a request may be tried on
    drain_grace_s: float = Field(default=30.0, ge=0)
    log_level: str = Field(default="INFO", validation_alias="LORAMUX_LOG_LEVEL")
    otlp_endpoint: str | None = Field(default=None, validation_alias="OTEL_EXPORTER_OTLP_ENDPOINT")

    @field_validator("replicas", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(address.strip() for address in value.split(",") if address.strip())
        return value

    @field_validator("listen", "adapter_store", "replicas")
    @classmethod
    def _have_ports(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for address in (value,) if isinstance(value, str) else value:
            if not address.rpartition(":")[2].isdigit():
                raise ValueError(f"{address!r} is not host:port")
        return value
