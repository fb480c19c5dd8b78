"""Products of the fused decoder, into buffers of its own.

A class per way in which weights are kept; ``merged`` makes one product of several linear layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock_enginecore.forward.cuda.kernel_api import Kernels
from penstock_enginecore.forward.cuda.quantized import quantized_product
from penstock_enginecore.forward.proof import UnsuitableError
from penstock_enginecore.models.quantization.layers import QuantizedLinear, QuantizedStack

Linear = torch.nn.Linear | QuantizedLinear


class Held(Protocol):
    """Weights that the decoder holds in place of a module."""

    @property
    def num_bytes(self) -> int:
        """Bytes of them."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of them, in order."""

    def to(self, device: torch.device) -> None:
        """Move them."""


class Product(Held, Protocol):
    """Rows times a weight that is kept in some way."""

    @property
    def bias(self) -> torch.Tensor | None:
        """``[out_features]``."""

    @property
    def out_features(self) -> int:
        """Numbers of a row of the product."""

    @property
    def in_features(self) -> int:
        """Numbers of a row that is multiplied."""

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Weight and bias, in all their parts."""

    def product(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """``x`` ``[rows, in_features]`` times the weight, without the bias, into ``out`` ``[rows, out_features]``."""

    def affine(self, x: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> None:
        """As ``product``, with the bias where there is one, times ``scale``."""

    def to(self, device: torch.device) -> None:
        """Move the weights."""


@dataclass(frozen=True, slots=True)
class Dense:
    """``weight`` ``[out_features, in_features]`` and ``bias`` ``[out_features]`` as they are in the checkpoint, by torch's own
    product (cuBLAS on a GPU, which chooses an order of sums by the number of rows), or by batch-invariant ``kernels``.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    kernels: Kernels | None = None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.tensors)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The weight, and the bias where there is one."""
        return [p for p in (self.weight, self.bias) if p is not None]

    def product(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self.kernels is not None:
            self.kernels.product(x, self.weight, None, 1.0, out)
        else:
            torch.mm(x, self.weight.t(), out=out)

    def affine(self, x: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> None:
        if self.kernels is not None:
            self.kernels.product(x, self.weight, self.bias, scale, out)
        elif self.bias is not None:
            torch.addmm(self.bias, x, self.weight.t(), beta=scale, alpha=scale, out=out)
        elif scale != 1.0:
            torch.addmm(out, x, self.weight.t(), beta=0.0, alpha=scale, out=out)
        else:
            self.product(x, out)

    def to(self, device: torch.device) -> None:
        for parameter in self.tensors:
            parameter.data = parameter.data.to(device)


def merged(linears: Sequence[Linear], kernels: Kernels) -> Product:
    """One product of ``linears``, whose rows follow one another. Weights are held once: those of the layers become parts of the
    whole, and the layers go on computing what they did. UnsuitableError where some have a bias and some have none, where they
    are quantized in several ways, and for a way that there is no product for.
    """
    biased = {linear._parameters["bias"] is not None for linear in linears}
    if len(biased) > 1:
        raise UnsuitableError("some of the linear layers of one product have a bias, and some have none")
    quantized = [linear for linear in linears if isinstance(linear, QuantizedLinear)]
    if 0 < len(quantized) < len(linears):
        raise UnsuitableError("some of the linear layers of one product are quantized, and some are not")
    bias = _whole(linears, "bias") if biased.pop() else None
    if quantized:
        return quantized_product(quantized, bias, kernels)
    return Dense(_whole(linears, "weight"), bias, kernels if kernels.batch_invariant else None)


def _whole(linears: Sequence[Linear], name: str) -> torch.nn.Parameter:
    """Parameters of one layer as they are, of several as parts of one."""
    first: torch.nn.Parameter = linears[0].get_parameter(name)
    return first if len(linears) == 1 else _joined(linears, name)


@torch.inference_mode(False)
@torch.no_grad()
def _joined(linears: Sequence[Linear], name: str) -> torch.nn.Parameter:
    """Parameters one after the other along their first dimension; those of the layers are then views of their places."""
    whole = torch.cat([getattr(linear, name) for linear in linears])
    start = 0
    for linear in linears:
        end = start + linear.out_features
        setattr(linear, name, torch.nn.Parameter(whole[start:end], requires_grad=False))
        start = end
    return torch.nn.Parameter(whole, requires_grad=False)


def empty(module: Linear | QuantizedStack) -> None:
    """Let go of the weights of a module that a product stands for. Its name and sizes stay, which adapters go by."""
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, torch.nn.Parameter(parameter.new_empty(0), requires_grad=False))
