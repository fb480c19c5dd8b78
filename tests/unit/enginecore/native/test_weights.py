"""Weights as 8-bit integers with one scale per row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock_enginecore.native.weights import as_int8, round_linears, round_to_int8


@given(
    st.integers(1, 9),
    st.integers(1, 70),
    st.integers(0, 2**31),
    st.sampled_from([1e-20, 1e-3, 1.0, 1e20]),
)
def test_a_rounded_weight_is_found_to_be_integers_and_is_off_by_half_a_step(
    n: int, k: int, seed: int, size: float
) -> None:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * size
    rounded = round_to_int8(weight)
    integers = as_int8(rounded)
    assert integers is not None
    assert torch.equal(integers.numbers.float() * integers.scales[:, None], rounded)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((rounded - weight).abs() <= step * 0.501).all()
    assert torch.equal(round_to_int8(rounded), rounded)


def test_rows_of_zeros_stay_zeros() -> None:
    weight = torch.cat([torch.zeros(2, 6), torch.randn(1, 6)])
    rounded = round_to_int8(weight)
    assert not rounded[:2].any()
    integers = as_int8(rounded)
    assert integers is not None
    assert torch.equal(integers.numbers.float() * integers.scales[:, None], rounded)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.0 + 2**-20])
def test_a_weight_with_one_other_number_is_none(value: float) -> None:
    rounded = round_to_int8(torch.randn(8, 16))
    rounded[7, 3] = value
    assert as_int8(rounded) is None
    assert as_int8(torch.randn(8, 16)) is None
    assert as_int8(torch.empty(0, 16)) is None


def test_linear_layers_are_rounded_but_the_one_that_is_named() -> None:
    head = torch.nn.Linear(8, 4)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8, bias=False), head)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    error = round_linears(model, but=head)
    after = [parameter.detach() for parameter in model.parameters()]
    changed = [not torch.equal(old, new) for old, new in zip(before, after, strict=True)]
    assert changed == [True, False, False, False, True, False, False]  # weight, bias, norm, weight, head
    errors = [float((after[i] - before[i]).norm() / before[i].norm()) for i in (0, 4)]
    assert error == pytest.approx(max(errors))
    assert 0 < error < 0.02
