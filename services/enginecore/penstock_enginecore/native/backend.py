"""The CPU kernels as one backend: which parts of a model's work they are to do, and what does it."""

import logging
from dataclasses import dataclass

import torch

from penstock_enginecore.attention.base import AttentionBackend
from penstock_enginecore.config import KernelsConfig
from penstock_enginecore.native.attention import NativeAttention
from penstock_enginecore.native.library import KernelsError, NativeLibrary, find_library, open_library
from penstock_enginecore.native.sampling import NativeSampling

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NativeBackend:
    """``library``: the kernels of one instruction set. ``uses``: what they are configured to do."""

    library: NativeLibrary
    uses: KernelsConfig

    def attention(self, fallback: AttentionBackend) -> AttentionBackend:
        """Attention by the kernels, and by ``fallback`` for what they do not take."""
        return NativeAttention(self.library, fallback)

    def sampling(self) -> NativeSampling | None:
        """Peaks and draws by the kernels; None where that is off."""
        return NativeSampling(self.library) if self.uses.sampler else None

    def describe(self, *parts: object) -> str:
        """The instruction set, the names of ``parts`` that are in use (no others are true), the threads, and what products of
        bfloat16 weights are made of where that is not floats.
        """
        used = ", ".join(str(part) for part in parts if part)
        count = self.library.parts
        inputs = "rounded to bfloat16" if count == 1 else f"in {count} bfloat16 parts"
        numbers = f", inputs {inputs}" if count else ""
        return f"{self.library.isa} kernels ({used or 'unused'}), {self.library.num_threads} threads{numbers}"


def multiplies_linears(config: KernelsConfig, device: torch.device, *, rounded: bool) -> bool:
    """Whether ``config`` asks for kernels that multiply with the weights of any model, and they are there. ``rounded``: see
    ``open_backend``.
    """
    if config.isa == "off" or device.type != "cpu" or not config.linear:
        return False
    try:
        find_library(config.isa, rounded=rounded)
    except KernelsError:  # told when they are opened
        return False
    return True


def open_backend(
    config: KernelsConfig, device: torch.device, num_threads: int, *, rounded: bool = False
) -> NativeBackend | None:
    """The kernels that ``config`` asks for; None where they are off, not built, or not for this device. ``rounded``: they may
    round inputs of products to bfloat16. Raises KernelsError where an instruction set is named that cannot be had.
    """
    if config.isa == "off" or device.type != "cpu":
        return None
    try:
        return NativeBackend(open_library(config.isa, num_threads, rounded=rounded), config)
    except KernelsError as e:
        if config.isa != "auto":
            raise
        logger.warning("computing without kernels, which is slower: %s", e)
        return None
