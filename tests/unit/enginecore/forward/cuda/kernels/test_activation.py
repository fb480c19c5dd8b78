"""Gated activations against torch in float64."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import gelu, silu

from tests.fakes.models.interpreted_kernels import interpreted

activation = interpreted("activation")

# The interpreter uses numpy's exp(), which warns about infinities.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")

ORACLES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu": lambda gate, up: silu(gate) * up,
    "gelu": lambda gate, up: gelu(gate) * up,
    "gelu_tanh": lambda gate, up: gelu(gate, approximate="tanh") * up,
}


def check(kind: str, tokens: int, width: int, dtype: torch.dtype) -> None:
    gate_up = (3 * torch.randn(tokens, 2 * width, generator=torch.Generator().manual_seed(width))).to(dtype)
    memory = torch.full((tokens + 1, width), torch.nan, dtype=dtype)
    activation.gated(gate_up, kind, memory[:tokens])
    gate, up = gate_up.double().chunk(2, dim=1)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(memory[:tokens].double(), ORACLES[kind](gate, up), rtol=tolerance, atol=tolerance)
    assert bool(memory[tokens].isnan().all())


@settings(max_examples=25)
@given(
    kind=st.sampled_from(list(ORACLES)),
    tokens=st.integers(1, 4),
    width=st.integers(1, 200),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_any_shape(kind: str, tokens: int, width: int, dtype: torch.dtype) -> None:
    check(kind, tokens, width, dtype)


@pytest.mark.parametrize("kind", ORACLES)
def test_more_than_one_program_per_token(kind: str) -> None:
    check(kind, 2, 2880, torch.float32)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_large_gates(kind: str) -> None:
    out = torch.full((1, 4), torch.nan)
    activation.gated(torch.tensor([[-200.0, 200.0, -1e30, 1e5, 1.0, 1.0, 1.0, 1.0]]), kind, out)
    torch.testing.assert_close(out, torch.tensor([[0.0, 200.0, 0.0, 1e5]]))


def test_no_tokens() -> None:
    activation.gated(torch.empty(0, 8), "silu", torch.empty(0, 4))


def test_other_shapes_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"`gate_up` has shape \[2, 8\], which does not match the output's shape \[2, 5\]"
    ):
        activation.gated(torch.ones(2, 8), "silu", torch.ones(2, 5))
