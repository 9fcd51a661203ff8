"""Pages and rows for the tests of KV append and attention; memory that no kernel may read or write holds NaN."""

import torch
from torch import Tensor

from kernels.layouts import PAGE_SIZE, Batch, KVLayer
from kernels.reference.kv_append import LARGEST, quantise

STORAGES = [None, torch.int8, torch.float8_e4m3fn]  # None: the compute dtype


def empty_pages(
    num_pages: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    storage: torch.dtype | None,
    device: torch.device,
) -> KVLayer:
    """Poisoned with NaN; where the storage has none, the scales are."""
    shape = (num_pages, num_kv_heads, PAGE_SIZE, head_dim)
    if storage is None:
        k, v = (torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2))
        return KVLayer(k, v)
    k, v = (torch.zeros(shape, dtype=torch.int8, device=device).view(storage) for _ in range(2))
    k_scales, v_scales = (torch.full(shape[:3], float("nan"), device=device) for _ in range(2))
    return KVLayer(k, v, k_scales, v_scales)


def filled_pages(
    batch: Batch,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    storage: torch.dtype | None,
    generator: torch.Generator,
) -> KVLayer:
    """Random K and V in every slot below a request's context; all other slots stay poisoned."""
    device = batch.page_table.device
    num_pages = int(batch.page_table.max()) + 1 if batch.page_table.numel() else 1
    kv = empty_pages(max(num_pages, 1), num_kv_heads, head_dim, dtype, storage, device)
    for request, context in enumerate(batch.context_lens.tolist()):
        at = torch.arange(context)
        pages, offsets = batch.page_table[request].cpu()[at // PAGE_SIZE].long(), at % PAGE_SIZE
        for store, scales in ((kv.k_pages, kv.k_scales), (kv.v_pages, kv.v_scales)):
            new = torch.randn((context, num_kv_heads, head_dim), generator=generator)
            if scales is None:
                store[pages, :, offsets] = new.to(store)
            else:
                assert storage in LARGEST
                stored, new_scales = quantise(new, storage)
                store.view(torch.uint8)[pages, :, offsets] = stored.view(torch.uint8).to(device)
                scales[pages, :, offsets] = new_scales.to(device)
    return kv


def query_rows(
    num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """[rows, (H + 2G) * D], a view whose rows are farther apart than they are long."""
    width = (num_heads + 2 * num_kv_heads) * head_dim
    return torch.randn((num_rows, width + 32), generator=generator).to(dtype)[:, :width]
