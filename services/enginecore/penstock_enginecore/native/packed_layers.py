"""Layers that the kernels take over in models that the decoder does not know."""

from collections.abc import Iterator

import torch

from penstock_enginecore.native.experts import PackedExperts
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.linear import PackedLinear
from penstock_enginecore.native.router_weight import RouterWeight


class PackedLayers:
    """The linear layers and experts of ``model`` that compute in float32, replaced by packed ones, and the weights of the routers
    beside such experts.
    """

    def __init__(self, model: torch.nn.Module, library: NativeLibrary) -> None:
        self._replaced = [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent._modules.items()  # named_children leaves repeated ones out
            if child is not None and (_is_linear(child) or PackedExperts.takes(child))
        ]
        mixtures = [parent for parent in model.modules() if any(map(_is_mixed, parent.children()))]
        self._routed = [found for mixture in mixtures for found in _router_weights(mixture)]
        self._packed = {child: _packed(library, child) for child in {child for _, _, child in self._replaced}}
        weights = [RouterWeight.of(library, weight) for _, _, weight in self._routed]
        for parent, name, child in self._replaced:
            setattr(parent, name, self._packed[child])
        for (router, name, _), weight in zip(self._routed, weights, strict=True):
            setattr(router, name, weight)
        self.num_layers = len(self._packed)
        self.num_bytes = sum(layer.num_bytes for layer in self._packed.values())
        self.num_bytes += sum(weight.packed.num_bytes for weight in weights)

    def undo(self) -> None:
        """Put the old layers back."""
        for parent, name, child in (*self._replaced, *self._routed):
            setattr(parent, name, child)

    def keep(self) -> None:
        """Let go of the old layers' weights."""
        for layer in self._packed.values():
            if isinstance(layer, PackedExperts):
                layer.free()
        self._replaced, self._routed, self._packed = [], [], {}


def _is_linear(module: torch.nn.Module) -> bool:
    return type(module) is torch.nn.Linear and _is_float32(module.weight)


def _is_float32(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.device.type == "cpu"


def _is_mixed(module: torch.nn.Module) -> bool:
    """Whether tokens are routed to what is in ``module``: experts, here or on other ranks too."""
    return PackedExperts.takes(module) or getattr(module, "has_routed_experts", False)


def _packed(library: NativeLibrary, module: torch.nn.Module) -> PackedLinear | PackedExperts:
    return PackedLinear(library, module) if isinstance(module, torch.nn.Linear) else PackedExperts(library, module)


def _router_weights(mixture: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """Weights of modules of a ``mixture`` that multiply with them by themselves."""
    for child in mixture.children():
        if _is_mixed(child):
            continue
        for module in child.modules():
            weight = module._parameters.get("weight")
            if weight is not None and weight.dim() == 2 and _is_float32(weight) and not _is_linear(module):
                yield module, "weight", weight
