"""Definition of lora.py in plain torch, on any device."""

from __future__ import annotations

from torch import Tensor

from kernels.layouts import BASE, LoraLayer


def lora(y: Tensor, x: Tensor, layer: LoraLayer, token_adapter: Tensor) -> None:
    """y[t, slice s] += x[t] @ A_s.T @ B_s for t's adapter, in fp32, rounded to y's dtype once; base rows stay as they are.

    y [T, N], x [T, K], token_adapter [T]. Synchronises with the host: it is a definition, not a fast path.
    """
    for adapter in set(token_adapter.tolist()) - {BASE}:
        tokens = (token_adapter == adapter).nonzero().squeeze(1)
        for s, (lo, hi) in enumerate(zip(layer.slice_offsets, layer.slice_offsets[1:], strict=False)):
            rank = int(layer.tables.ranks[adapter, s])
            rows = layer.tables.row_table[adapter, :rank].long()
            h = x[tokens].float() @ layer.a[rows, s].float().T
            delta = h @ layer.b[rows, lo:hi].float()
            y[tokens, lo:hi] = (y[tokens, lo:hi].float() + delta).to(y.dtype)
