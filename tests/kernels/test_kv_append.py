"""KV append against its definition: rotation, norms, slots, storages; and the bounds of the quantised storages."""

import pytest
import torch

from kernels.kv_append import kv_append
from kernels.layouts import KVLayer
from kernels.reference import kv_append as reference
from kernels.tolerances import worst_error
from kernels.workloads import make_batch
from tests.kernels.kv_inputs import STORAGES, empty_pages, query_rows

SHAPES = [(32, 8, 128), (16, 8, 128), (9, 3, 64), (4, 2, 96), (2, 1, 256)]


def angles(max_position: int, head_dim: int) -> torch.Tensor:
    turns = torch.arange(max_position)[:, None] * 10000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
    return torch.cat([turns.cos(), turns.sin()], dim=1)


def check_append(
    shape: tuple[int, int, int],
    generator: torch.Generator,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    storage: torch.dtype | None = None,
    norms: tuple[bool, bool] = (False, False),
) -> None:
    """A mixed step: chunks that end at page -1, 0 and +1, an empty request, padding rows that write nowhere."""
    heads, kv_heads, dim = shape
    batch = make_batch([2, 1, 0, 1], [15, 16, 0, 17], [-1] * 4, generator, device, padding_rows=1)
    rows = query_rows(batch.num_tokens, heads, kv_heads, dim, dtype, generator).to(device)
    wide = rows.float()
    cos_sin = angles(20, dim).to(device)
    q_norm, k_norm = (
        torch.rand(dim, generator=generator).to(dtype).to(device) + 0.5 if asked else None for asked in norms
    )
    got, want = (empty_pages(4, kv_heads, dim, dtype, storage, device) for _ in range(2))
    q = kv_append(rows, heads, cos_sin, got, batch, q_norm, k_norm, 1e-5)
    want_q = reference.kv_append(wide, heads, cos_sin, want, batch, q_norm, k_norm, 1e-5)
    assert q.data_ptr() == rows.data_ptr() and q.shape == (batch.num_tokens, heads, dim)
    assert worst_error(q, want_q) <= 1
    assert torch.equal(rows[:, heads * dim :].float(), wide[:, heads * dim :])  # k and v stay as they were
    for ours, scales, theirs, their_scales in (
        (got.k_pages, got.k_scales, want.k_pages, want.k_scales),
        (got.v_pages, got.v_scales, want.v_pages, want.v_scales),
    ):
        if scales is None or their_scales is None:
            assert torch.equal(ours.isnan(), theirs.isnan())  # the same slots are written, no others
            assert worst_error(ours.nan_to_num(), theirs.nan_to_num()) <= 1
            continue
        assert torch.equal(scales.isnan(), their_scales.isnan())
        scales, their_scales = scales.nan_to_num(), their_scales.nan_to_num()
        torch.testing.assert_close(scales, their_scales, rtol=1e-5, atol=0)
        # Rounding of the rotation may move a value over a border: by one step, and seldom.
        steps = (ours.float() - theirs.float()).abs()
        assert (steps > 0).float().mean() < 0.01
        assert (steps <= (1.0 if storage == torch.int8 else 32.0)).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: tuple[int, int, int], device: torch.device, generator: torch.Generator) -> None:
    check_append(shape, generator, device)
    check_append(shape, generator, device, dtype=torch.float16)


@pytest.mark.parametrize("norms", [(True, True), (True, False), (False, True)])
def test_norms(norms: tuple[bool, bool], device: torch.device, generator: torch.Generator) -> None:
    check_append((9, 3, 64), generator, device, norms=norms)


@pytest.mark.parametrize("storage", STORAGES[1:])
def test_quantised_storage(storage: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    check_append((9, 3, 64), generator, device, storage=storage)
    check_append((4, 2, 96), generator, device, storage=storage, dtype=torch.float16, norms=(True, True))


@pytest.mark.parametrize("storage", STORAGES[1:])
def test_stored_bits_are_those_of_the_reference(
    storage: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Unrotated v, over twelve orders of magnitude, with zeros: every rounding, ties and subnormal numbers included."""
    batch = make_batch([16], [16], [-1], generator, device)
    magnitudes = 10.0 ** torch.linspace(-8, 4, 16)[:, None]
    rows = (torch.randn((16, 3 * 64), generator=generator) * magnitudes).to(device)
    rows[3] = 0.0
    rows[4] = torch.arange(-95.5, 96.0)  # halves: ties, if the scale is 1
    rows[4, 128] = 448.0 if storage == torch.float8_e4m3fn else 127.0
    got, want = (empty_pages(1, 1, 64, torch.float32, storage, device) for _ in range(2))
    cos_sin = angles(16, 64).to(device)
    reference.kv_append(rows.clone(), 1, cos_sin, want, batch, None, None, 1e-5)
    kv_append(rows, 1, cos_sin, got, batch, None, None, 1e-5)
    assert got.v_scales is not None and want.v_scales is not None
    torch.testing.assert_close(got.v_scales, want.v_scales, rtol=1e-6, atol=0)
    if device.type == "cpu":
        assert torch.equal(got.v_pages.view(torch.uint8), want.v_pages.view(torch.uint8))
    else:  # a GPU's division may differ in the last bit, and move a value over a border
        assert ((got.v_pages.float() - want.v_pages.float()).abs() > 0).float().mean() < 0.01


@pytest.mark.parametrize("storage", STORAGES[1:])
def test_error_bounds_of_the_storages(storage: torch.dtype, generator: torch.Generator) -> None:
    x = torch.randn((500, 64), generator=generator) * 10.0 ** torch.randint(-4, 4, (500, 1), generator=generator)
    stored, scales = reference.quantise(x, storage)
    error = (reference.dequantise(stored, scales) - x).abs()
    half_step = scales[:, None] / 2
    if storage == torch.float8_e4m3fn:
        half_step = torch.maximum(x.abs() / 16, scales[:, None] / 1024)
    assert (error <= half_step * (1 + 1e-5)).all()


def test_a_row_has_the_same_bits_alone(device: torch.device, generator: torch.Generator) -> None:
    batch = make_batch([3, 1], [20, 9], [-1] * 2, generator, device)
    rows = query_rows(4, 9, 3, 64, torch.float32, generator).to(device)
    cos_sin = angles(20, 64).to(device)
    kv, solo_kv = (empty_pages(3, 3, 64, torch.float32, None, device) for _ in range(2))
    solo_rows = rows[3:].clone()
    kv_append(rows, 9, cos_sin, kv, batch, None, None, 1e-5)
    solo = make_batch([1], [9], [-1], generator, device)
    solo.slot_mapping.copy_(batch.slot_mapping[3:])
    kv_append(solo_rows, 9, cos_sin, solo_kv, solo, None, None, 1e-5)
    assert torch.equal(solo_rows, rows[3:])
    written = ~solo_kv.k_pages.isnan()
    assert written.sum() == 3 * 64 and torch.equal(solo_kv.k_pages[written], kv.k_pages[written])


@pytest.mark.parametrize(
    ("qkv_shape", "cos_width", "kv", "field"),
    [
        ((4, 960), 64, KVLayer(torch.zeros(2, 3, 16, 64), torch.zeros(2, 3, 16, 64), torch.ones(2, 3, 16)), "k_scales"),
        ((4, 900), 64, None, "qkv"),
        ((4, 960), 32, None, "cos_sin"),
        ((3, 960), 64, None, "positions"),
    ],
)
def test_what_it_refuses(
    qkv_shape: tuple[int, int], cos_width: int, kv: KVLayer | None, field: str, generator: torch.Generator
) -> None:
    batch = make_batch([4], [4], [-1], generator)
    pages = kv or KVLayer(torch.zeros(2, 3, 16, 64), torch.zeros(2, 3, 16, 64))
    with pytest.raises(ValueError, match=field):
        kv_append(torch.zeros(qkv_shape), 9, torch.zeros(8, cos_width), pages, batch, None, None, 1e-5)
