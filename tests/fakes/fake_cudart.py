"""The part of the CUDA runtime that locks pages of host memory."""

import mmap


class FakeCudart:
    """Registered memory. ``limit`` is the number of bytes that may be registered, or None without limit.

    Attributes:
        registered: Size of each registered piece in bytes, by address.
    """

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.limit: int | None = None

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        """Register memory. Returns 2 without memory, 712 for pages that are registered already, else 0."""
        assert flags == 0
        if self.limit is not None and sum(self.registered.values()) + num_bytes > self.limit:
            return 2
        pages = set(_pages(address, num_bytes))
        if any(pages & set(_pages(*piece)) for piece in self.registered.items()):
            return 712
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        """Unregister the piece at ``address``. Returns 713 for an unknown piece, else 0."""
        return 0 if self.registered.pop(address, None) is not None else 713


def _pages(address: int, num_bytes: int) -> range:
    return range(address // mmap.PAGESIZE, -(-(address + num_bytes) // mmap.PAGESIZE))
