"""Gated activations against their definition."""

import pytest
import torch

from kernels.activation import act_mul
from kernels.reference import activation as reference
from kernels.tolerances import worst_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_act_mul(activation: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    for width in (40, 1536, 2056):  # part of a tile, one tile, one and a bit
        gate_up = (2 * torch.randn((3, 2 * width + 8), generator=generator)).to(dtype).to(device)[:, : 2 * width]
        assert worst_error(act_mul(gate_up, activation), reference.act_mul(gate_up.float(), activation)) <= 1


@pytest.mark.filterwarnings("ignore:overflow")  # numpy's, of the interpreter's exp
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_far_ends(activation: str, device: torch.device) -> None:
    gate_up = torch.tensor([[-80.0, 80.0, 0.0, 1.0, 2.0, 3.0]], device=device)
    assert worst_error(act_mul(gate_up, activation), reference.act_mul(gate_up, activation)) <= 1


def test_no_rows_and_what_it_refuses(device: torch.device) -> None:
    assert act_mul(torch.empty((0, 8), device=device), "silu").shape == (0, 4)
    with pytest.raises(ValueError, match="activation"):
        act_mul(torch.zeros(1, 8), "relu")
    with pytest.raises(ValueError, match="gate_up"):
        act_mul(torch.zeros(1, 7), "silu")
