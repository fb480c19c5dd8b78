"""Memory whose addresses outlast it."""

import torch

from penstock_enginecore.device_memory.driver import Driver

CHUNK = 256 * 2**20
"""Bytes that are taken and given back at once."""


class Region:
    """``num_bytes``, or a few more, at addresses that stay what they are. There is no memory behind them at first, nor while the
    region sleeps. What does not fit the device raises MemoryError and leaves the region as it was.
    """

    def __init__(self, driver: Driver, num_bytes: int, chunk: int = CHUNK) -> None:
        self._driver = driver
        self._chunk = _whole(chunk, driver.granularity)
        self.num_bytes = _whole(num_bytes, driver.granularity)
        self._address = driver.reserve(self.num_bytes)
        self._handles: list[int] = []
        """Of the chunks that have memory, in order."""
        self._memory: torch.Tensor | None = None

    @property
    def mapped_bytes(self) -> int:
        """How many of its bytes have memory, the first ones."""
        return min(len(self._handles) * self._chunk, self.num_bytes)

    @property
    def memory(self) -> torch.Tensor:
        """uint8 ``[num_bytes]``: the same for as long as the region is. RuntimeError before any of it has had memory."""
        if self._memory is None:
            raise RuntimeError("a region that never had memory is read")
        return self._memory

    def map(self, num_bytes: int | None = None) -> None:
        """Have memory behind the first ``num_bytes`` at least, behind all for None. What is in new memory is of no meaning."""
        wanted, had = self.num_bytes if num_bytes is None else num_bytes, len(self._handles)
        try:
            while self.mapped_bytes < wanted:
                self._map_next()
        except BaseException:
            self._unmap_from(had)
            raise
        if self._memory is None:
            with torch.inference_mode(False):  # it is written to in and out of that mode
                self._memory = self._driver.tensor(self._address, self.num_bytes)

    def unmap(self) -> None:
        """Give all memory back, and keep the addresses."""
        self._unmap_from(0)

    def close(self) -> None:
        """Give up the addresses too. Nothing may use them any more."""
        self.unmap()
        self._memory = None
        self._driver.free(self._address, self.num_bytes)

    def _map_next(self) -> None:
        start = self.mapped_bytes
        size = min(self._chunk, self.num_bytes - start)
        handle = self._driver.create(size)
        try:
            self._driver.map(self._address + start, size, handle)
        except BaseException:
            self._driver.release(handle)
            raise
        self._handles.append(handle)

    def _unmap_from(self, count: int) -> None:
        """All but the first ``count`` chunks, the last first."""
        while len(self._handles) > count:
            end = self.mapped_bytes
            start = (len(self._handles) - 1) * self._chunk
            self._driver.unmap(self._address + start, end - start)
            self._driver.release(self._handles.pop())


def _whole(count: int, unit: int) -> int:
    return -(-max(count, 1) // unit) * unit
