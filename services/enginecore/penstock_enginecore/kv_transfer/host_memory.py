"""Host memory for KV blocks and recurrent states, which is page-locked if blocks are copied to and from a GPU."""

import logging
import math
import mmap
from typing import Any

import torch

logger = logging.getLogger(__name__)

_TOUCHED = 64 << 20
"""Number of bytes of new host memory that one call fills with zeros."""
PIECE = 1 << 30
"""Number of bytes of host memory that one call registers with the GPU's driver, if slots are small. The driver holds a
lock during the call, so kernel launches of other threads wait for each piece.
"""


class HostMemory:
    """Host memory for blocks: uint8 ``[num_slots, slot_bytes]``. All memory pages are allocated at creation, so copies
    never wait for page faults.

    ``pinned`` makes the memory page-locked, for copies between host and device. The current device must be the device
    of these copies. Page-locked memory of torch's allocator would be as large as the next power of two, and torch would
    never free it. Raises MemoryError if there is too little memory.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, pinned: bool, piece: int = PIECE) -> None:
        self._registered: list[int] = []
        """Addresses of the registered pieces."""
        try:
            self.slots = _mapped(num_slots, slot_bytes) if pinned else _filled(num_slots, slot_bytes)
        except (RuntimeError, OSError, OverflowError) as e:
            raise _shortage(num_slots, slot_bytes, str(e)) from e
        if not pinned or not self.slots.numel():
            return
        begin, end = self.slots.data_ptr(), self.slots.data_ptr() + num_slots * slot_bytes
        step = _piece_bytes(slot_bytes, piece)
        for address in range(begin, end, step):
            status = int(_runtime().cudaHostRegister(address, min(step, end - address), 0))
            if status:
                self.close()
                raise _shortage(num_slots, slot_bytes, f"cudaHostRegister failed with CUDA error {status}")
            self._registered.append(address)

    def close(self) -> None:
        """Free the memory. No copy may use the memory any more, and ``slots`` is empty afterwards."""
        while self._registered:
            status = int(_runtime().cudaHostUnregister(self._registered.pop()))
            if status:
                logger.warning("cannot unregister page-locked host memory: cuda_error=%d", status)
        self.slots = torch.empty(0, dtype=torch.uint8)


def _runtime() -> Any:
    runtime: Any = torch.cuda.cudart  # torch has no types for this function.
    return runtime()


def _filled(num_slots: int, slot_bytes: int) -> torch.Tensor:
    slots = torch.empty(num_slots, slot_bytes, dtype=torch.uint8)
    flat = slots.view(-1)
    for start in range(0, len(flat), _TOUCHED):
        flat[start : start + _TOUCHED].zero_()
    return slots


def _mapped(num_slots: int, slot_bytes: int) -> torch.Tensor:
    """Return memory at the start of a page. The memory pages are not allocated yet; the driver allocates them when it
    locks them.
    """
    size = num_slots * slot_bytes
    if not size:
        return torch.empty(num_slots, slot_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # After a fork, a write of this process would move the written page, and the GPU would still read the old page.
    memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size).view(num_slots, slot_bytes)


def _piece_bytes(slot_bytes: int, piece: int) -> int:
    """Return the number of bytes to register at once. The number is a multiple of the page size, because no page may be
    registered twice, and of ``slot_bytes``, because a copy fails if its memory is in two registered pieces.
    """
    unit = math.lcm(slot_bytes, mmap.PAGESIZE)
    return max(piece // unit, 1) * unit


def _shortage(num_slots: int, slot_bytes: int, reason: str) -> MemoryError:
    return MemoryError(f"cannot allocate {num_slots} slots of {slot_bytes} bytes of host memory: {reason}")
