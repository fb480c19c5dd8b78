"""Products of the fused decoder with weights that stay quantized."""

from collections.abc import Sequence

import torch

from penstock_enginecore.forward.cuda.launches import Float8Weight, Kernels
from penstock_enginecore.forward.proof import UnsuitableError
from penstock_enginecore.models.quantization.float8 import Float8
from penstock_enginecore.models.quantization.linear import QuantizedLinear
from penstock_enginecore.models.quantization.scheme import Scheme


def keeps(scheme: Scheme) -> bool:
    """Whether there is a product with weights of ``scheme``: a tile of its columns must not cross a block of the scales."""
    if not isinstance(scheme, Float8):
        return False
    width = 0 if isinstance(scheme.granularity, str) else scheme.granularity[1]
    return width == 0 or (width >= 16 and width & (width - 1) == 0)


class Float8Product:
    """8-bit floats, by a kernel of our own. As ``Dense``, of which it has the methods."""

    def __init__(self, weight: Float8Weight, bias: torch.Tensor | None, kernels: Kernels) -> None:
        self.bias = bias
        self._weight = weight
        self._kernels = kernels

    @property
    def out_features(self) -> int:
        """Numbers of a row of the product."""
        return self._weight.numbers.shape[0]

    @property
    def in_features(self) -> int:
        """Numbers of a row that is multiplied."""
        return self._weight.numbers.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of numbers, scales and bias."""
        tensors = (self._weight.numbers, self._weight.scales, *(() if self.bias is None else (self.bias,)))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def product(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """``x`` ``[rows, in_features]`` times the weight, without the bias, into ``out`` ``[rows, out_features]``."""
        self._kernels.float8_product(x, self._weight, None, 1.0, out)

    def affine(self, x: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> None:
        """As ``product``, with the bias where there is one, times ``scale``."""
        self._kernels.float8_product(x, self._weight, self.bias, scale, out)

    def to(self, device: torch.device) -> None:
        """Move the weights."""
        weight = self._weight
        self._weight = Float8Weight(weight.numbers.to(device), weight.scales.to(device), weight.width)
        if self.bias is not None:
            self.bias.data = self.bias.data.to(device)


@torch.inference_mode(False)
@torch.no_grad()
def float8_product(linears: Sequence[QuantizedLinear], bias: torch.Tensor | None, kernels: Kernels) -> Float8Product:
    """One product of ``linears``, whose rows follow one another. Numbers are held once: those of the layers become parts of the
    whole. UnsuitableError where they are not all quantized in one way that there is a product for.
    """
    schemes = {linear.scheme for linear in linears}
    scheme = next(iter(schemes))
    if len(schemes) > 1 or not isinstance(scheme, Float8) or not keeps(scheme):
        named = ", ".join(sorted(each.name for each in schemes))
        raise UnsuitableError(f"there is no product with weights that are {named}")
    found = [scheme.by_rows(linear.tensors) for linear in linears]
    numbers = linears[0].tensors[""].data
    if len(linears) > 1:
        numbers = torch.cat([linear.tensors[""] for linear in linears])
        start = 0
        for linear in linears:
            linear.replace("", numbers[start : start + linear.out_features])
            start += linear.out_features
    return Float8Product(
        Float8Weight(numbers, torch.cat([scales for scales, _ in found], dim=1), found[0][1]), bias, kernels
    )
