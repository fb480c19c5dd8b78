"""Host memory in slots, each as large as a worker's part of a block."""

import torch

_TOUCHED = 64 << 20
"""Bytes that are touched at once."""


class HostMemory:
    """``[num_slots, slot_bytes]``, uint8. All of it is there from the start: nothing waits for a page while it is copied to.
    ``pinned``: page-locked, for a device that copies to it. Raises MemoryError where there is not as much.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, pinned: bool) -> None:
        try:
            self.slots = torch.empty(num_slots, slot_bytes, dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError as e:
            raise MemoryError(f"{num_slots} slots of {slot_bytes} bytes of host memory: {e}") from e
        if not pinned:
            flat = self.slots.view(-1)
            for start in range(0, len(flat), _TOUCHED):
                flat[start : start + _TOUCHED].zero_()
