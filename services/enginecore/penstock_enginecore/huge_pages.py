"""Host memory on huge pages, for tensors that are read sequentially."""

import math
import mmap

import torch

_HUGE_PAGE = 2 * 1024 * 1024


def huge_empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized CPU tensor ``[*shape]``, on huge pages if the operating system has huge pages and the
    tensor fills at least one of them.
    """
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < _HUGE_PAGE:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, -(-size // _HUGE_PAGE) * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # use normal pages for the rest, because the last huge page would not be full
        memory.madvise(mmap.MADV_HUGEPAGE, 0, size // _HUGE_PAGE * _HUGE_PAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
