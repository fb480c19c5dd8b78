"""Weights in the layout the kernels read: see ``csrc/gemm.h``."""

import ctypes
import mmap

import torch

from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.structs import Linear

_HUGE_PAGE = 2 * 1024 * 1024


class PackedWeight:
    """A weight ``[n, k]`` float32 and a bias ``[n]``, packed. ``struct`` points into them."""

    def __init__(self, library: NativeLibrary, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        weight = weight.detach().float().contiguous()
        self.n, self.k = weight.shape
        panel = 2 * library.lanes
        self._packed = _huge_empty(-(-self.n // panel) * panel * self.k)
        library.call("pack", weight.data_ptr(), self.n, self.k, self.k, self._packed.data_ptr())
        self._bias = None if bias is None else bias.detach().float().clone()
        self.struct = Linear(
            self._packed.data_ptr(), None if self._bias is None else self._bias.data_ptr(), *weight.shape
        )
        self.pointer = ctypes.addressof(self.struct)

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""
        return 4 * (self._packed.numel() + (0 if self._bias is None else self._bias.numel()))


def _huge_empty(count: int) -> torch.Tensor:
    """Float32 ``[count]`` on huge pages where the system has them: weights are read from one end to the other."""
    size = max(4 * count, 1)
    if size < _HUGE_PAGE:
        return torch.empty(count)
    memory = mmap.mmap(-1, -(-size // _HUGE_PAGE) * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32, count=count)
