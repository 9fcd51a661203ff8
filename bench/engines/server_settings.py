"""One set-up as settings of our model server, for the engine alone and for the whole stack alike."""

from __future__ import annotations

from bench.engines.engine import Setup

# Values the server's own defaults would be too small for in a workload of many requests at once.
_MAX_REQUESTS = 4096
# Not what happens to be free: as much for KV as its peers get. And the engine alone has no adapter store, without which a
# server gives adapters no memory.
_KV_BYTES = 2 * 2**30
_ADAPTER_BYTES = 512 * 2**20


def server_settings(setup: Setup) -> dict[str, str]:
    """By the field names of model_server.config.Config. Prefixes are not reused: prompts repeat between rounds."""
    settings = {
        "model": setup.model,
        "dtype": setup.dtype,
        "device": setup.device,
        "prefix_cache": "false",
        "max_running": str(setup.max_running),
        "max_requests": str(_MAX_REQUESTS),
        "kv_bytes": str(_KV_BYTES),
        "adapter_bytes": str(_ADAPTER_BYTES if setup.adapter_bytes is None else setup.adapter_bytes),
    }
    if setup.max_resident is not None:
        settings["max_adapters"] = str(setup.max_resident)
    return {**settings, **setup.settings}
