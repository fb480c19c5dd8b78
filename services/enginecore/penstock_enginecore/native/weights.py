"""Weights in the layout the kernels read, in panels of as many rows as two vectors have lanes (``csrc/gemm.h``)."""

import ctypes
import mmap

import torch

from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.structs import Linear

_HUGE_PAGE = 2 * 1024 * 1024


class PackedWeight:
    """A weight ``[n, k]`` and a bias ``[n]``, packed. ``struct`` points into them. A weight whose every number bfloat16 holds
    is kept in it: half the memory, and half the time to read it.
    """

    def __init__(self, library: NativeLibrary, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        half = _fits_bfloat16(weight)
        weight = weight.detach().float().contiguous()
        self.n, self.k = weight.shape
        self.dtype = torch.bfloat16 if half else torch.float32
        panel = 2 * library.lanes
        self._packed = _huge_empty(-(-self.n // panel) * panel * self.k, self.dtype)
        self._bias = None if bias is None else bias.detach().float().clone()
        bias_pointer = None if self._bias is None else self._bias.data_ptr()
        self.struct = Linear(self._packed.data_ptr(), bias_pointer, self.n, self.k, half)
        self.pointer = ctypes.addressof(self.struct)
        library.call("pack", weight.data_ptr(), self.pointer)

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""
        return sum(part.numel() * part.element_size() for part in (self._packed, self._bias) if part is not None)


def _fits_bfloat16(weight: torch.Tensor) -> bool:
    if weight.dtype == torch.float32:
        return not bool((weight.detach().contiguous().view(torch.int32) & 0xFFFF).any())
    return weight.dtype == torch.bfloat16


def _huge_empty(count: int, dtype: torch.dtype) -> torch.Tensor:
    """``[count]`` on huge pages where the system has them: weights are read from one end to the other."""
    size = count * dtype.itemsize
    if size < _HUGE_PAGE:
        return torch.empty(count, dtype=dtype)
    memory = mmap.mmap(-1, -(-size // _HUGE_PAGE) * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count)
