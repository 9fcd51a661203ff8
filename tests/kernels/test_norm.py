"""RMSNorm against its definition."""

import pytest
import torch

from kernels.norm import add_rms_norm, rms_norm
from kernels.reference import norm as reference
from kernels.tolerances import worst_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [64, 100, 576, 4096])
def test_rms_norm(width: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    x = torch.randn((3, width + 8), generator=generator).to(dtype).to(device)[:, :width]
    weight = torch.rand(width, generator=generator).to(dtype).to(device)
    assert worst_error(rms_norm(x, weight, 1e-5), reference.rms_norm(x.float(), weight, 1e-5)) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_add_rms_norm(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    x, residual = (torch.randn((5, 576), generator=generator).to(dtype).to(device) for _ in range(2))
    weight = torch.rand(576, generator=generator).to(dtype).to(device)
    want_residual = residual.clone()
    want = reference.add_rms_norm(x, want_residual, weight, 1e-5)
    got = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, want_residual)
    assert worst_error(got, want.float()) <= 1


def test_a_row_has_the_same_bits_alone(device: torch.device, generator: torch.Generator) -> None:
    x = torch.randn((4, 576), generator=generator).to(device)
    weight = torch.ones(576, device=device)
    assert torch.equal(rms_norm(x, weight, 1e-5)[2:3], rms_norm(x[2:3], weight, 1e-5))


def test_no_rows_and_a_row_of_zeros(device: torch.device) -> None:
    weight = torch.ones(64, device=device)
    assert rms_norm(torch.empty((0, 64), device=device), weight, 1e-5).shape == (0, 64)
    assert torch.equal(rms_norm(torch.zeros((1, 64), device=device), weight, 1e-5), torch.zeros((1, 64), device=device))


def test_what_it_refuses() -> None:
    x = torch.zeros(2, 64)
    with pytest.raises(ValueError, match="weight"):
        rms_norm(x, torch.ones(63), 1e-5)
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(x, torch.zeros(3, 64), torch.ones(64), 1e-5)
    with pytest.raises(ValueError, match="x:"):
        rms_norm(x.T, torch.ones(2), 1e-5)
