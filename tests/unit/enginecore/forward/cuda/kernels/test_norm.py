"""add + RMSNorm against torch in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_enginecore.forward.cuda.kernel_api import Norm
from tests.fakes.models.interpreted_kernels import interpreted

norm = interpreted("norm")


def expected(x: torch.Tensor, weight: Norm) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + weight.eps) * (weight.weight.double() + weight.offset)


def check(tokens: int, width: int, dtype: torch.dtype, offset: float, *, adds: bool) -> None:
    generator = torch.Generator().manual_seed(tokens * width)
    x, residual = (3 * torch.randn(2, tokens, width, generator=generator)).to(dtype).unbind()
    # Numbers outside the row are NaN, so reading them would spoil the row's sum.
    memory = torch.full((3, tokens + 1, width), torch.nan, dtype=dtype)
    memory[0, :tokens], memory[1, :tokens] = x, residual
    x_seen, residual_seen, out = memory[:, :tokens].unbind()
    weight = Norm(torch.nn.Parameter(torch.randn(width, generator=generator).to(dtype)), 1e-2, offset)
    norm.add_rms_norm(x_seen, residual_seen if adds else None, weight, out)
    total = x + residual if adds else x
    tolerance = 1e-6 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(out.double(), expected(total, weight), rtol=tolerance, atol=tolerance)
    assert torch.equal(residual_seen, total if adds else residual)
    assert torch.equal(x_seen, x)
    assert bool(memory[:, tokens].isnan().all())


@settings(max_examples=20)
@given(
    tokens=st.integers(1, 5),
    width=st.integers(1, 300),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    offset=st.sampled_from([0.0, 1.0]),
    adds=st.booleans(),
)
def test_any_shape(tokens: int, width: int, dtype: torch.dtype, offset: float, adds: bool) -> None:
    check(tokens, width, dtype, offset, adds=adds)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("width", [2880, 5120])
def test_hidden_sizes_that_are_no_power_of_two(width: int, adds: bool) -> None:
    check(2, width, torch.float16, 1.0, adds=adds)


def test_no_tokens() -> None:
    none = torch.empty(0, 8)
    norm.add_rms_norm(none, None, Norm(torch.nn.Parameter(torch.ones(8)), 1e-6, 0.0), none.clone())


@pytest.mark.parametrize(
    ("x", "out", "width", "message"),
    [
        ((2, 8), (2, 9), 8, r"\[2, 9\] and \[2, 8\]"),
        ((2, 8), (2, 8), 9, r"the norm's weight has shape \[9\], but the hidden size is 8"),
    ],
)
def test_other_shapes_are_refused(x: tuple[int, int], out: tuple[int, int], width: int, message: str) -> None:
    weight = Norm(torch.nn.Parameter(torch.ones(width)), 1e-6, 0.0)
    with pytest.raises(ValueError, match=message):
        norm.add_rms_norm(torch.ones(x), None, weight, torch.ones(out))


def test_strided_rows_are_refused() -> None:
    weight = Norm(torch.nn.Parameter(torch.ones(8)), 1e-6, 0.0)
    with pytest.raises(ValueError, match="contiguous"):
        norm.add_rms_norm(torch.ones(2, 16)[:, ::2], None, weight, torch.ones(2, 8))
