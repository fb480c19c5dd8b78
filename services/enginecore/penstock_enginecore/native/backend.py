"""Selection of the CPU kernels and of the work that they do, and the objects through which they are used."""

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
from penstock_enginecore.models.latent_hook import LatentHeads
from penstock_enginecore.native.attention import NativeAttention
from penstock_enginecore.native.experts import PackedExperts, PackedRouter, RouterWeight
from penstock_enginecore.native.ffi_structs import Mask, Sampling
from penstock_enginecore.native.latents import PackedLatentHeads
from penstock_enginecore.native.library import KernelsError, NativeLibrary, find_library, open_library
from penstock_enginecore.native.linear import PackedLinear
from penstock_enginecore.native.states import NativeStateKernels
from penstock_enginecore.sample.rules import GrammarRows

# Grammar masks, argmax, and random sampling without filters by the kernels.


class NativeSampling:
    """Sampling by the kernels. All threads take part in one pass over the logits. The results are the same as those of
    ``peak`` and ``draw`` in ``sample.filters``.
    """

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    def takes(self, logits: torch.Tensor) -> bool:
        """Return whether the kernels support these logits."""
        return logits.dtype == torch.float32 and logits.device.type == "cpu" and logits.is_contiguous()

    def mask(self, logits: torch.Tensor, grammar: GrammarRows) -> None:
        """Replace the logits of tokens whose bits are not set in the grammar's mask by -infinity, in place, like
        ``sample.rules.mask_grammar``.
        """
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
        """Return, for each row, the largest logit and a column, int64, both ``[rows]``.

        The column is the first column with the largest logit. If ``temperature`` is not 0 and this logit is finite, the
        column is instead sampled with ``uniforms``.
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


# Packed layers for models that the kernels' decoder does not support.


class PackedLayers:
    """Replaces the float32 linear layers, latent projections, experts and routers of ``model`` by packed modules. Also
    packs weights of other routers in mixtures with such experts.

    The original weights of a layer are freed before the next layer is packed, so memory never contains two copies of
    the whole model.
    """

    def __init__(self, model: torch.nn.Module, library: NativeLibrary) -> None:
        mixtures = [parent for parent in model.modules() if any(map(_is_mixed, parent.children()))]
        routed = [router for mixture in mixtures for router in _routers(mixture)]
        # only ids of modules, so that this set keeps no module alive
        beside = {id(module) for mixture in mixtures for module in mixture.modules()}
        places: dict[torch.nn.Module, list[tuple[torch.nn.Module, str]]] = {}
        for parent in model.modules():
            for name, child in parent._modules.items():  # named_children would skip repeated modules
                if child is not None and _is_packable(child):
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


def _is_packable(module: torch.nn.Module) -> bool:
    return _is_linear(module) or _is_latent(module) or PackedExperts.takes(module) or PackedRouter.takes(module)


def _is_latent(module: torch.nn.Module) -> bool:
    return type(module) is LatentHeads and _is_float32(module.weight)


def _is_float32(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.device.type == "cpu"


def _is_mixed(module: torch.nn.Module) -> bool:
    """Return whether ``module`` has experts to which tokens are routed, on this rank or on other ranks."""
    return PackedExperts.takes(module) or getattr(module, "has_routed_experts", False)


def _packed(
    library: NativeLibrary, module: torch.nn.Module, *, apart: bool
) -> PackedLinear | PackedLatentHeads | PackedExperts | PackedRouter:
    if isinstance(module, LatentHeads):
        return PackedLatentHeads(library, module)
    if isinstance(module, torch.nn.Linear):
        return PackedLinear(library, module, apart=apart)
    if PackedRouter.takes(module):
        return PackedRouter(library, module)
    experts = PackedExperts(library, module)
    experts.free()
    give_back_free()  # without this call, the C library would keep freed blocks of this size
    return experts


def _routers(mixture: torch.nn.Module) -> Iterator[Any]:
    """Yield the routers of ``mixture``: modules that multiply inputs by a weight of their own, without a linear layer."""
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
    """CPU kernels for one instruction set. ``uses`` are the settings that say for which work the kernels are used."""

    library: NativeLibrary
    uses: KernelsConfig

    def attention(self, fallback: AttentionBackend) -> AttentionBackend:
        """Return the attention backend that uses the kernels. The backend ``fallback`` computes the layers that the
        kernels do not support.
        """
        return NativeAttention(self.library, fallback)

    def states(self) -> NativeStateKernels | None:
        """Return the kernels for recurrent layers, or None if the settings disable these kernels."""
        return NativeStateKernels(self.library) if self.uses.states else None

    def sampling(self) -> NativeSampling | None:
        """Return the sampling by the kernels, or None if the settings disable this sampling."""
        return NativeSampling(self.library) if self.uses.sampler else None

    def describe(self, *parts: object) -> str:
        """Return a description for the log: the instruction set, the names in ``parts``, the number of threads, and the
        format of inputs for bfloat16 weights.

        Parts that are False are left out.
        """
        used = ", ".join(str(part) for part in parts if part)
        count = self.library.parts
        inputs = "rounded to bfloat16" if count == 1 else f"in {count} bfloat16 parts"
        numbers = f", inputs {inputs}" if count else ""
        return f"{self.library.isa} kernels ({used or 'unused'}), {self.library.num_threads} threads{numbers}"


def multiplies_linears(config: KernelsConfig, device: torch.device, *, rounded: bool) -> bool:
    """Return whether ``config`` selects the kernels for linear layers, and whether these kernels are available. See
    ``open_backend``.
    """
    if config.isa == "off" or device.type != "cpu" or not config.linear:
        return False
    try:
        find_library(config.isa, rounded=rounded)
    except KernelsError:  # ``open_backend`` reports this error later
        return False
    return True


def open_backend(
    config: KernelsConfig, device: torch.device, num_threads: int, *, rounded: bool = False
) -> NativeBackend | None:
    """Return the kernels that ``config`` selects, or None if the kernels are disabled, were not built, or do not
    support this device.

    If ``rounded`` is true, kernels may round inputs of matrix products to bfloat16. Raises KernelsError if ``config``
    names an instruction set that is not available.
    """
    if config.isa == "off" or device.type != "cpu":
        return None
    try:
        return NativeBackend(open_library(config.isa, num_threads, rounded=rounded), config)
    except KernelsError as e:
        if config.isa != "auto":
            raise
        logger.warning("computing with PyTorch instead of native kernels (slower) reason=%s", e)
        return None
