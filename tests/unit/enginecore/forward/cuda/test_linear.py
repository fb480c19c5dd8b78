"""Linear layers as one product."""

import pytest
import torch

from penstock_enginecore.forward.cuda.linear import Dense, empty, merged
from penstock_enginecore.models.errors import UnsuitableError
from tests.fakes.models.torch_kernels import TorchKernels


def layers(*, bias: bool) -> list[torch.nn.Linear]:
    torch.manual_seed(0)
    return [torch.nn.Linear(6, n, bias=bias) for n in (4, 2, 3)]


@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_a_product_is_those_of_the_layers_one_after_the_other(bias: bool) -> None:
    linears, x = layers(bias=bias), torch.randn(5, 6)
    expected = torch.cat([linear(x) for linear in linears], dim=1)
    product, out = merged(linears, TorchKernels()), torch.full((5, 9), torch.nan)
    assert (product.in_features, product.out_features) == (6, 9)
    product.affine(x, out)
    torch.testing.assert_close(out, expected)
    out.fill_(torch.nan)
    product.affine(x, out, 0.3)
    torch.testing.assert_close(out, expected * 0.3)
    product.product(x, out)
    torch.testing.assert_close(out, expected - (product.bias if product.bias is not None else 0))


@torch.inference_mode()
def test_weights_are_held_once_and_the_layers_still_compute() -> None:
    linears, x = layers(bias=True), torch.randn(5, 6)
    expected = [linear(x) for linear in linears]
    product = merged(linears, TorchKernels())
    whole = product.weight.untyped_storage().data_ptr()
    assert {linear.weight.untyped_storage().data_ptr() for linear in linears} == {whole}
    for linear, kept in zip(linears, expected, strict=True):
        assert torch.equal(linear(x), kept)
    assert product.num_bytes == 4 * 9 * 7


def test_one_layer_is_its_own_product() -> None:
    [linear, *_] = layers(bias=True)
    product = merged([linear], TorchKernels())
    assert product == Dense(linear.weight, linear.bias)
    assert product.weight is linear.weight


def test_a_bias_on_some_of_the_layers_is_refused() -> None:
    linears = [*layers(bias=True), *layers(bias=False)]
    with pytest.raises(
        UnsuitableError, match="only some of the linear layers that one matrix product computes have a bias"
    ):
        merged(linears, TorchKernels())


def test_an_emptied_layer_keeps_its_sizes() -> None:
    [linear, *_] = layers(bias=True)
    empty(linear)
    assert (linear.in_features, linear.out_features) == (6, 4)
    assert linear.weight.numel() == linear.bias.numel() == 0
