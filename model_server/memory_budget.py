"""How the engine's memory is divided between KV pages and the adapter bank. Pure: what is measured comes in as a number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryParts:
    kv_bytes: int
    adapter_bytes: int


def divide(
    memory_bytes: int,
    *,
    adapter_share: float,
    adapter_limit_bytes: int,
    kv_bytes: int | None = None,
    adapter_bytes: int | None = None,
    page_bytes: int = 1,
) -> MemoryParts:
    """The two parts of `memory_bytes`. A part that is given is taken as it is, and the other gets the rest of the budget;
    with both given the budget does not matter.

    `adapter_share`: of the budget, for the bank; at most `adapter_limit_bytes`, beyond which it could not be filled (0:
    this server has no adapters). What the bank leaves goes to KV. `page_bytes`: the least that KV must hold.
    Raises ValueError naming the setting at fault.
    """
    if adapter_bytes is None:
        if kv_bytes is None:
            share_bytes = int(memory_bytes * adapter_share)
        elif kv_bytes > memory_bytes and adapter_limit_bytes:
            raise ValueError(
                f"kv_bytes: {kv_bytes} exceed memory_bytes ({memory_bytes}), of which adapters get the rest; "
                "set adapter_bytes too, or a larger memory_bytes"
            )
        else:
            share_bytes = max(0, memory_bytes - kv_bytes)
        adapter_bytes = min(share_bytes, adapter_limit_bytes)
    elif kv_bytes is None and adapter_bytes >= memory_bytes:
        raise ValueError(f"adapter_bytes: {adapter_bytes} leave nothing of memory_bytes ({memory_bytes}) to KV pages")
    at_fault = "memory_bytes" if kv_bytes is None else "kv_bytes"
    if kv_bytes is None:
        kv_bytes = memory_bytes - adapter_bytes
    if kv_bytes < page_bytes:
        raise ValueError(f"{at_fault}: {kv_bytes} bytes for KV hold no page of {page_bytes} bytes")
    return MemoryParts(kv_bytes, adapter_bytes)
