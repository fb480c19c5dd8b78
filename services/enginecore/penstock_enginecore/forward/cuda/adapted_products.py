"""Products of the fused decoder to which adapters add."""

from collections.abc import Callable, Sequence

import torch

from penstock_enginecore.forward.cuda.adapters import DeviceAdapters
from penstock_enginecore.forward.cuda.kernel_api import LowRankKernels
from penstock_enginecore.forward.cuda.linear import Linear, Product
from penstock_enginecore.lora.device_slots import SlotLimits
from penstock_enginecore.lora.slot_memory import Place

Adapt = Callable[[Sequence[Linear], Product], Product]
"""What computes in place of a product of linear layers."""


def unadapted(linears: Sequence[Linear], product: Product) -> Product:  # noqa: ARG001 - an ``Adapt``
    """The product itself."""
    return product


class AdaptedProduct:
    """A ``Product``. In a step with adapters it adds theirs behind the product with its bias and scale: a row that has none keeps
    its bits.
    """

    def __init__(self, product: Product, add_to: Callable[[torch.Tensor, float, torch.Tensor], None]) -> None:
        self._product = product
        self._add_to = add_to

    @property
    def bias(self) -> torch.Tensor | None:
        """That of the product."""
        return self._product.bias

    @property
    def out_features(self) -> int:
        """Those of the product."""
        return self._product.out_features

    @property
    def in_features(self) -> int:
        """Those of the product."""
        return self._product.in_features

    @property
    def num_bytes(self) -> int:
        """Those of the product."""
        return self._product.num_bytes

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those of the product."""
        return self._product.tensors

    def product(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._product.product(x, out)
        self._add_to(x, 1.0, out)

    def affine(self, x: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> None:
        self._product.affine(x, out, scale)
        self._add_to(x, scale, out)

    def to(self, device: torch.device) -> None:
        """Move the weights of the product."""
        self._product.to(device)


class ProductAdapters:
    """Adapters of the products of a decoder of ``module``, which are named to ``adapt`` and ``adapt_head`` while it is built."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._names = {id(part): name for name, part in module.named_modules()}
        self._places: list[Place] = []
        self._adapters: DeviceAdapters | None = None

    def adapt(self, linears: Sequence[Linear], product: Product) -> Product:
        """An ``Adapt``."""
        return self._adapted(linears, product, of_rows=False)

    def adapt_head(self, head: Linear, product: Product) -> Product:
        """As ``adapt``, of the head."""
        return self._adapted([head], product, of_rows=True)

    def open(
        self, limits: SlotLimits, dtype: torch.dtype, device: torch.device, kernels: LowRankKernels
    ) -> DeviceAdapters:
        """All of them, once the decoder is built."""
        self._adapters = DeviceAdapters(self._places, limits, dtype, device, kernels)
        return self._adapters

    def _adapted(self, linears: Sequence[Linear], product: Product, *, of_rows: bool) -> Product:
        layers = {self._names[id(linear)]: (linear.out_features, linear.in_features) for linear in linears}
        place = len(self._places)
        self._places.append(Place(layers, of_rows))

        def add_to(x: torch.Tensor, scale: float, out: torch.Tensor) -> None:
            if self._adapters is not None:
                self._adapters.add_to(place, x, scale, out)

        return AdaptedProduct(product, add_to)
