"""Attention against its definition, and the promise that a row's result knows nothing but its own request."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.attention_split import SPLIT
from kernels.layouts import Batch, KVLayer
from kernels.paged_attention import paged_attention
from kernels.reference import paged_attention as reference
from kernels.tolerances import worst_error
from kernels.workloads import make_batch
from tests.kernels.kv_inputs import STORAGES, filled_pages, query_rows

LLAMA, QWEN, SMOLLM2, UNPADDED = (32, 8, 128), (16, 8, 128), (9, 3, 64), (4, 2, 96)
SHARE = (3, 1, 64)  # of SmolLM2: fewer programs for the interpreter


def queries(
    batch: Batch, shape: tuple[int, int, int], generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A strided view, as of the fused projection."""
    heads, kv_heads, dim = shape
    rows = query_rows(batch.num_tokens, heads, kv_heads, dim, dtype, generator).to(batch.page_table.device)
    return rows[:, : heads * dim].unflatten(1, (heads, dim))


def check_attention(
    query_lens: list[int],
    context_lens: list[int],
    shape: tuple[int, int, int],
    generator: torch.Generator,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    storage: torch.dtype | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    batch = make_batch(query_lens, context_lens, [-1] * len(query_lens), generator, device, padding_rows=2)
    kv = filled_pages(batch, shape[1], shape[2], dtype, storage, generator)
    q = queries(batch, shape, generator, dtype)
    q[sum(query_lens) :] = float("nan")  # padding rows reach nobody
    scale = shape[2] ** -0.5
    got = paged_attention(q, kv, batch, scale, window, soft_cap)
    want = reference.paged_attention(q.float(), kv, batch, scale, window, soft_cap)
    rows = sum(query_lens)
    assert worst_error(got[:rows], want[:rows]) <= 1


@pytest.mark.parametrize("storage", STORAGES)
def test_page_and_split_borders(storage: torch.dtype | None, device: torch.device, generator: torch.Generator) -> None:
    contexts = [1, 15, 16, 17, 0, SPLIT, SPLIT + 1]
    shape = SMOLLM2 if storage is None else SHARE
    check_attention([1, 1, 1, 1, 0, 1, 1], contexts, shape, generator, device, storage=storage)


@pytest.mark.parametrize("storage", STORAGES)
def test_prefill_with_prior_context_beside_decode(
    storage: torch.dtype | None, device: torch.device, generator: torch.Generator
) -> None:
    check_attention([23, 0, 1, 2], [40, 0, 33, SPLIT + 1], SHARE, generator, device, storage=storage)


@pytest.mark.parametrize(("window", "soft_cap"), [(1, None), (20, None), (None, 5.0), (SPLIT + 20, 30.0)])
def test_window_and_soft_cap(
    window: int | None, soft_cap: float | None, device: torch.device, generator: torch.Generator
) -> None:
    lens = [1, 30, 1], [2 * SPLIT + 30, 40, 7]
    check_attention(*lens, UNPADDED, generator, device, window=window, soft_cap=soft_cap)


@pytest.mark.parametrize("shape", [LLAMA, QWEN, (4, 1, 256), (2, 2, 80)])
def test_head_shapes_in_half_precision(
    shape: tuple[int, int, int], device: torch.device, generator: torch.Generator
) -> None:
    check_attention([1, 3], [18, 17], shape, generator, device, dtype=torch.float16)


def test_no_requests_and_no_context(device: torch.device, generator: torch.Generator) -> None:
    for lens in ([], [0, 0]):
        batch = make_batch(lens, lens, lens, generator, device, padding_rows=3)
        kv = filled_pages(batch, 3, 64, torch.float32, None, generator)
        assert paged_attention(queries(batch, SMOLLM2, generator), kv, batch, 0.1, None, None).shape == (3, 576)


def alone(batch: Batch, request: int, query_len: int, shift: int = 0) -> tuple[Batch, slice]:
    """One request of the batch by itself, its last `query_len` rows but for the last `shift`; and those rows."""
    start, end = (int(batch.query_indptr[request + i]) - i * shift for i in range(2))
    rows = slice(end - query_len, end)
    assert rows.start >= start
    indptr = torch.tensor([0, query_len], dtype=torch.int32, device=batch.query_indptr.device)
    context = batch.context_lens[request : request + 1] - shift
    solo = replace(
        batch,
        query_indptr=indptr,
        context_lens=context,
        page_table=batch.page_table[request : request + 1].contiguous(),
        num_tokens=query_len,
        num_requests=1,
        max_query_len=query_len,
        max_context_len=int(context),
    )
    return solo, rows


def bits_of_solo_runs(q: Tensor, kv: KVLayer, batch: Batch, chunk: int, window: int | None, out: Tensor) -> None:
    """Each request by itself, in chunks of at most `chunk` tokens, gives the bits that `out` holds."""
    for request in range(batch.num_requests):
        length = int(batch.query_indptr[request + 1] - batch.query_indptr[request])
        for first in range(0, length, chunk):
            size = min(chunk, length - first)
            solo, rows = alone(batch, request, size, length - first - size)
            got = paged_attention(q[rows], kv, solo, 0.125, window, None)
            assert torch.equal(got, out[rows]), f"request {request}, rows {rows}"


@pytest.mark.parametrize("window", [None, 70])
def test_a_row_has_the_same_bits_alone(window: int | None, device: torch.device, generator: torch.Generator) -> None:
    batch = make_batch([1, 25, 1, 2], [SPLIT + 40, SPLIT + 10, 9, 70], [-1] * 4, generator, device)
    kv = filled_pages(batch, 1, 64, torch.float32, None, generator)
    q = queries(batch, SHARE, generator)
    out = paged_attention(q, kv, batch, 0.125, window, None)
    bits_of_solo_runs(q, kv, batch, 25, window, out)


def test_chunks_and_decode_have_the_bits_of_one_prefill(device: torch.device, generator: torch.Generator) -> None:
    batch = make_batch([24], [SPLIT + 12], [-1], generator, device)
    kv = filled_pages(batch, 1, 64, torch.float32, None, generator)
    q = queries(batch, SHARE, generator)
    out = paged_attention(q, kv, batch, 0.125, None, None)
    bits_of_solo_runs(q, kv, batch, 7, None, out)
    for shift in (0, 12, 23):  # positions around the split's border, as decodes
        solo, rows = alone(batch, 0, 1, shift)
        got = paged_attention(q[rows], kv, solo, 0.125, None, None)
        # On a GPU the two kernels are different machine code: equal but for rounding.
        assert torch.equal(got, out[rows]) if device.type == "cpu" else worst_error(got, out[rows]) <= 1


def test_a_graph_captured_for_longer_contexts(device: torch.device, generator: torch.Generator) -> None:
    """The grid of a captured graph is that of the longest context; results keep their bits."""
    batch = make_batch([1, 1, 0], [40, 17, 0], [-1] * 3, generator, device)
    kv = filled_pages(batch, 1, 64, torch.float32, None, generator)
    q = queries(batch, SHARE, generator)
    captured = replace(batch, max_context_len=5 * SPLIT)
    outs = [paged_attention(q, kv, b, 0.125, None, None) for b in (batch, captured)]
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"window": 0}, "window"),
        ({"soft_cap": 0.0}, "soft_cap"),
        ({"q": torch.zeros(1, 8, 64)}, "q"),
        ({"q": torch.zeros(1, 9, 32)}, "q"),
        ({"q": torch.zeros(1, 9, 128)[:, :, ::2]}, "q"),
        ({"q": torch.zeros(1, 9, 64, dtype=torch.float16)}, "k_pages"),
        ({"kv": KVLayer(torch.zeros(2, 3, 8, 64), torch.zeros(2, 3, 8, 64))}, "k_pages"),
        ({"kv": KVLayer(torch.zeros(2, 3, 16, 64), torch.zeros(3, 3, 16, 64))}, "v_pages"),
        ({"kv": KVLayer(*[torch.zeros(2, 3, 16, 64, dtype=torch.int8)] * 2)}, "k_scales"),
    ],
)
def test_what_it_refuses(change: dict[str, object], field: str, generator: torch.Generator) -> None:
    batch = make_batch([1], [4], [-1], generator)
    arguments: dict[str, object] = {
        "q": torch.zeros(1, 9, 64),
        "kv": KVLayer(torch.zeros(2, 3, 16, 64), torch.zeros(2, 3, 16, 64)),
        "batch": batch,
        "scale": 0.1,
        "window": None,
        "soft_cap": None,
    }
    with pytest.raises(ValueError, match=field):
        paged_attention(**{**arguments, **change})  # type: ignore[arg-type]
