"""What ranks of one host exchange, in memory that they share: ``csrc/exchange.cpp``."""

import ctypes
import functools
import mmap
import os
from pathlib import Path

import torch

from penstock_common.errors import ConfigError

PIECE = 128 * 1024
"""Bytes that are exchanged at once: a step's hidden states of 16 tokens fit, and the slots stay in the caches."""
_LINE = 128
_LIBRARY = Path(__file__).parents[1] / "native" / "kernels_baseline.so"
_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_NUMBER, _POINTER = ctypes.c_int64, ctypes.c_void_p


def create(size: int) -> int:
    """A descriptor of memory for ``size`` ranks, not inherited unless it is passed on."""
    descriptor = os.memfd_create("penstock-exchange", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, _num_bytes(size))
    return descriptor


@functools.cache
def available() -> bool:
    """Whether the package was built with a compiler, for a system that has what this needs."""
    try:
        _functions()
    except (OSError, AttributeError):
        return False
    return True


class SharedMemoryCollectives:
    """``Collectives`` of float32 and bfloat16 sums, in rank order; bfloat16 ones are rounded once. A rank that waits looks for 50
    microseconds and then sleeps. One whose neighbour has ended waits until it is killed. ``base``: the address of the memory.
    """

    def __init__(self, memory: int, rank: int, size: int) -> None:
        """``memory``: a descriptor that ``create`` made for ``size`` ranks. Raises ConfigError where there is no library,
        ValueError for other memory.
        """
        if not available():
            raise ConfigError(
                "executor.collectives is 'shm', which needs the CPU kernels; install a C++ compiler and this package again, or "
                "use 'gloo'"
            )
        if os.fstat(memory).st_size != _num_bytes(size):
            raise ValueError(f"descriptor {memory} is no memory of {size} ranks")
        self.rank, self.size = rank, size
        self._map = mmap.mmap(memory, _num_bytes(size))
        self._pinned = ctypes.c_char.from_buffer(self._map)  # the mapping stays as long as this
        self.base = ctypes.addressof(self._pinned)
        self._sum, self._gather = _functions()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Collectives``. TypeError for other dtypes; the tensor is contiguous."""
        if tensor.dtype not in _KINDS or not tensor.is_contiguous():
            raise TypeError(f"sums are of contiguous {', '.join(map(str, _KINDS))}, and not of {tensor.dtype}")
        own = self.base, self.rank, self.size, PIECE
        self._sum(*own, tensor.data_ptr(), tensor.numel(), _KINDS[tensor.dtype])
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        tensor = tensor.contiguous()
        gathered = tensor.new_empty((self.size, *tensor.shape))
        self._gather(self.base, self.rank, self.size, PIECE, tensor.data_ptr(), gathered.data_ptr(), tensor.nbytes)
        return list(gathered.unbind())


def _num_bytes(size: int) -> int:
    return size * (_LINE + 2 * PIECE)


@functools.cache
def _functions() -> "tuple[ctypes._NamedFuncPointer, ctypes._NamedFuncPointer]":
    """They release the interpreter's lock. Raises OSError without the library, AttributeError for an older one."""
    library = ctypes.CDLL(str(_LIBRARY))
    add_up, gather = library.penstock_all_reduce, library.penstock_all_gather
    own = (_POINTER, _NUMBER, _NUMBER, _NUMBER)
    add_up.argtypes, add_up.restype = (*own, _POINTER, _NUMBER, _NUMBER), None
    gather.argtypes, gather.restype = (*own, _POINTER, _POINTER, _NUMBER), None
    return add_up, gather
