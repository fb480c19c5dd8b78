"""Layers that the kernels take over in models that the decoder does not know."""

from collections.abc import Iterator
from typing import Any

import torch

from penstock_common.allocator import give_back_free
from penstock_enginecore.native.experts import PackedExperts
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.linear import PackedLinear
from penstock_enginecore.native.router import PackedRouter
from penstock_enginecore.native.router_weight import RouterWeight


class PackedLayers:
    """The linear layers, experts and routers of ``model`` that compute in float32, replaced by packed ones, and the weights of
    other routers beside such experts. A layer's own weights are let go of when it is packed, before the next one is: a model is
    not in memory twice.
    """

    def __init__(self, model: torch.nn.Module, library: NativeLibrary) -> None:
        mixtures = [parent for parent in model.modules() if any(map(_is_mixed, parent.children()))]
        routed = [router for mixture in mixtures for router in _routers(mixture)]
        beside = {id(module) for mixture in mixtures for module in mixture.modules()}  # and holds none of them
        places: dict[torch.nn.Module, list[tuple[torch.nn.Module, str]]] = {}
        for parent in model.modules():
            for name, child in parent._modules.items():  # named_children leaves repeated ones out
                if child is not None and (_is_linear(child) or PackedExperts.takes(child) or PackedRouter.takes(child)):
                    places.setdefault(child, []).append((parent, name))
        self.num_layers, self.num_bytes = len(places), 0
        while places:
            child, parents = places.popitem()
            packed = _packed(library, child, apart=id(child) in beside)
            for parent, name in parents:
                setattr(parent, name, packed)
            self.num_bytes += packed.num_bytes
        for router in routed:
            router.weight = weight = RouterWeight.of(library, router.weight)
            self.num_bytes += weight.packed.num_bytes


def _is_linear(module: torch.nn.Module) -> bool:
    return type(module) is torch.nn.Linear and _is_float32(module.weight)


def _is_float32(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.device.type == "cpu"


def _is_mixed(module: torch.nn.Module) -> bool:
    """Whether tokens are routed to what is in ``module``: experts, here or on other ranks too."""
    return PackedExperts.takes(module) or getattr(module, "has_routed_experts", False)


def _packed(
    library: NativeLibrary, module: torch.nn.Module, *, apart: bool
) -> PackedLinear | PackedExperts | PackedRouter:
    if isinstance(module, torch.nn.Linear):
        return PackedLinear(library, module, apart=apart)
    if PackedRouter.takes(module):
        return PackedRouter(library, module)
    experts = PackedExperts(library, module)
    experts.free()
    give_back_free()  # the C library keeps blocks of this size
    return experts


def _routers(mixture: torch.nn.Module) -> Iterator[Any]:
    """Modules of a ``mixture`` that multiply with their weight by themselves."""
    for child in mixture.children():
        if _is_mixed(child) or PackedRouter.takes(child):
            continue
        for module in child.modules():
            weight = module._parameters.get("weight")
            if weight is not None and weight.dim() == 2 and _is_float32(weight) and not _is_linear(module):
                yield module
