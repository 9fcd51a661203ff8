"""The store's settings, read once from the environment."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """LORAMUX_ADAPTER_STORE_<NAME>, except where a field names its variable."""

    model_config = SettingsConfigDict(env_prefix="LORAMUX_ADAPTER_STORE_", populate_by_name=True, extra="forbid")

    listen: str = Field(default="127.0.0.1:50071", pattern=r":\d+$", description="host:port; port 0 takes a free one")
    data_dir: Path = Field(
        default=Path("adapters"), description="folder of the adapters' files and of the default catalog"
    )
    database_url: str = Field(default="", description="SQLAlchemy URL of the catalog; empty: SQLite in data_dir")
    max_adapter_bytes: int = Field(default=4 * 1024**3, gt=0, description="largest adapter_model.safetensors taken")
    max_catalog_bytes: int = Field(
        default=4_000_000, gt=0, le=4_000_000, description="size of the listing of all revisions, which is one message"
    )
    watch_queue: int = Field(
        default=1024, gt=0, description="changes held for a slow watcher before it gets a new snapshot"
    )
    otlp_endpoint: str = Field(default="", validation_alias="OTEL_EXPORTER_OTLP_ENDPOINT")
    log_level: str = Field(default="INFO", validation_alias="LORAMUX_LOG_LEVEL")

    @property
    def catalog_url(self) -> str:
        return self.database_url or f"sqlite:///{self.data_dir / 'catalog.db'}"
