"""Client of loramux: stream text from many LoRA adapters on one base model."""

from loramux.aio import AsyncClient
from loramux.client import Client
from protos.errors import ServiceError

__all__ = ["AsyncClient", "Client", "ServiceError"]
