"""Selection of the work that CPU kernels do, and the objects that do it."""

import ctypes
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock_common.memory import give_back_free
from penstock_enginecore.attention.base import AttentionBackend
from penstock_enginecore.config import KernelsConfig
from penstock_enginecore.native.attention import NativeAttention
from penstock_enginecore.native.experts import PackedExperts, PackedRouter, RouterWeight
from penstock_enginecore.native.ffi_structs import Mask, Sampling
from penstock_enginecore.native.library import KernelsError, NativeLibrary, find_library, open_library
from penstock_enginecore.native.linear import PackedLinear
from penstock_enginecore.native.states import NativeStateKernels
from penstock_enginecore.sample.rules import GrammarRows

# Grammar masks, argmax and unfiltered random sampling by the kernels.


class NativeSampling:
    """Sampling by the kernels, with the results of ``peak`` and ``draw`` in ``sample.filters``, in one pass by all
    threads.
    """

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    def takes(self, logits: torch.Tensor) -> bool:
        """Return whether the kernels support these logits."""
        return logits.dtype == torch.float32 and logits.device.type == "cpu" and logits.is_contiguous()

    def mask(self, logits: torch.Tensor, grammar: GrammarRows) -> None:
        """Keep only tokens whose bits are set, in place, like ``sample.rules.mask_grammar``."""
        bitmask = np.ascontiguousarray(grammar.bitmask)
        rows = np.ascontiguousarray(grammar.rows)
        if len(rows):
            mask = Mask(
                len(rows), logits.shape[1], logits.data_ptr(), rows.ctypes.data, bitmask.ctypes.data, bitmask.shape[1]
            )
            self._library.call("mask", ctypes.byref(mask))

    def sample(
        self, logits: torch.Tensor, temperature: npt.NDArray[np.float32], uniforms: npt.NDArray[np.float64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest value of each row and a column, int64, ``[rows]`` each.

        The column is the first one with that value. If ``temperature`` is not 0 and the value is finite, the column is
        sampled with ``uniforms`` instead.
        """
        peaks, columns = torch.empty(len(logits)), torch.empty(len(logits), dtype=torch.int64)
        uniforms = np.ascontiguousarray(uniforms)
        sampling = Sampling(
            *logits.shape,
            logits.data_ptr(),
            temperature.ctypes.data,
            uniforms.ctypes.data,
            peaks.data_ptr(),
            columns.data_ptr(),
        )
        self._library.call("sample", ctypes.byref(sampling))
        return peaks, columns


# Packed layers for models that the decoder does not support.


class PackedLayers:
    """Replaces the float32 linear layers, experts and routers of ``model`` by packed modules. Also packs weights of
    other routers in mixtures with such experts.

    A layer's own weights are freed before the next layer is packed, so the model is never in memory twice.
    """

    def __init__(self, model: torch.nn.Module, library: NativeLibrary) -> None:
        mixtures = [parent for parent in model.modules() if any(map(_is_mixed, parent.children()))]
        routed = [router for mixture in mixtures for router in _routers(mixture)]
        # ids only, so that no module is kept alive
        beside = {id(module) for mixture in mixtures for module in mixture.modules()}
        places: dict[torch.nn.Module, list[tuple[torch.nn.Module, str]]] = {}
        for parent in model.modules():
            for name, child in parent._modules.items():  # named_children would leave out repeated modules
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
    """Return whether tokens are routed to parts of ``module``, which are experts on this rank or other ranks."""
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
    give_back_free()  # the C library keeps freed blocks of this size
    return experts


def _routers(mixture: torch.nn.Module) -> Iterator[Any]:
    """Yield modules of a ``mixture`` that multiply by their own weight."""
    for child in mixture.children():
        if _is_mixed(child) or PackedRouter.takes(child):
            continue
        for module in child.modules():
            weight = module._parameters.get("weight")
            if weight is not None and weight.dim() == 2 and _is_float32(weight) and not _is_linear(module):
                yield module


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NativeBackend:
    """CPU kernels of one instruction set. ``uses`` are the settings for their use."""

    library: NativeLibrary
    uses: KernelsConfig

    def attention(self, fallback: AttentionBackend) -> AttentionBackend:
        """Return attention by the kernels. ``fallback`` computes the layers that the kernels do not support."""
        return NativeAttention(self.library, fallback)

    def states(self) -> NativeStateKernels | None:
        """Return kernels of recurrent layers, or None if they are turned off."""
        return NativeStateKernels(self.library) if self.uses.states else None

    def sampling(self) -> NativeSampling | None:
        """Return sampling by the kernels, or None if it is turned off."""
        return NativeSampling(self.library) if self.uses.sampler else None

    def describe(self, *parts: object) -> str:
        """Return a description: instruction set, names of ``parts`` in use, threads, and the format of inputs for
        bfloat16 weights.

        False parts are not in use.
        """
        used = ", ".join(str(part) for part in parts if part)
        count = self.library.parts
        inputs = "rounded to bfloat16" if count == 1 else f"in {count} bfloat16 parts"
        numbers = f", inputs {inputs}" if count else ""
        return f"{self.library.isa} kernels ({used or 'unused'}), {self.library.num_threads} threads{numbers}"


def multiplies_linears(config: KernelsConfig, device: torch.device, *, rounded: bool) -> bool:
    """Return whether ``config`` selects kernels for linear layers of any model, and whether these kernels are
    available. See ``open_backend``.
    """
    if config.isa == "off" or device.type != "cpu" or not config.linear:
        return False
    try:
        find_library(config.isa, rounded=rounded)
    except KernelsError:  # reported when they are opened
        return False
    return True


def open_backend(
    config: KernelsConfig, device: torch.device, num_threads: int, *, rounded: bool = False
) -> NativeBackend | None:
    """Return the kernels that ``config`` selects, or None if they are off, not built, or not for this device.

    With ``rounded``, kernels may round inputs of matrix products to bfloat16. Raises KernelsError if a named
    instruction set is not available.
    """
    if config.isa == "off" or device.type != "cpu":
        return None
    try:
        return NativeBackend(open_library(config.isa, num_threads, rounded=rounded), config)
    except KernelsError as e:
        if config.isa != "auto":
            raise
        logger.warning("computing without native kernels, which is slower reason=%s", e)
        return None
