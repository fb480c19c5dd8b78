"""Weights and KV cache that leave the device while an engine sleeps, and come back to where they were.

What was captured goes on knowing their addresses: an engine that wakes replays the graphs that it had.
"""

import gc
import logging
from collections.abc import Callable, Iterable
from typing import Literal

import torch

from penstock_common.memory import in_units
from penstock_enginecore.device_memory.driver import Driver
from penstock_enginecore.device_memory.region import CHUNK, Region

logger = logging.getLogger(__name__)

_ALIGNMENT = 256
State = Literal["here", "on the host", "dropped"]


class KeptMemory:
    """The state machine of one worker. ``give_back``: has the device's allocator return what nobody holds."""

    def __init__(self, driver: Driver, give_back: Callable[[], None], *, chunk: int = CHUNK) -> None:
        self._driver = driver
        self._give_back = give_back
        self._chunk = chunk
        self._weights: Region | None = None
        self._caches: list[Region] = []
        self._host: torch.Tensor | None = None
        self.weights: State = "here"
        self.cache: Literal["here", "dropped"] = "here"

    def move_in(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move the memory of ``tensors``, once and for all, a chunk at a time. All tensors of this process that lie there go
        along, whoever holds them.
        """
        sizes = _storages(tensors, self._driver.device)
        if not sizes:
            return
        lying = _lying_in(sizes)
        region = Region(self._driver, sum(_aligned(size) for size in sizes.values()), self._chunk)
        start, freed = 0, 0
        for address, size in sizes.items():
            region.map(start + size)
            _move(lying.pop(address), region.memory, start, size)
            start += _aligned(size)
            freed += size
            if freed >= self._chunk:
                self._give_back()
                freed = 0
        self._give_back()
        self._weights = region

    def empty(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of a KV cache ``[rows, columns]``, at an address of its own."""
        size = rows * columns * dtype.itemsize
        region = Region(self._driver, size, self._chunk)
        region.map()
        self._caches.append(region)
        return region.memory[:size].view(dtype).view(rows, columns)

    def sleep(self, level: int) -> None:
        """Give the cache back, and the weights, which go to host memory (level 1) or are gone (level 2). A deeper sleep may
        follow a lighter one, and what is away already stays away.
        """
        for region in self._caches:
            region.unmap()
        self.cache = "dropped"
        if self._weights is None:
            return
        if level > 1:
            self._host, self.weights = None, "dropped"
        elif self.weights == "here":
            self._host, self.weights = self._copy_of(self._weights), "on the host"
        self._weights.unmap()

    def wake_weights(self) -> bool:
        """Take the weights' memory back: whether they are in it, or are to be read again, see ``weights_are_read``. MemoryError
        where it does not fit; they sleep on then.
        """
        if self._weights is None or self.weights == "here":
            return True
        self._weights.map()
        if self._host is None:
            return False
        self._weights.memory.copy_(self._host)
        self.weights_are_read()
        return True

    def weights_are_read(self) -> None:
        """They are in their memory again."""
        self._host, self.weights = None, "here"

    def wake_cache(self) -> None:
        """Take the cache's memory back, all zeros. MemoryError where it does not fit; it sleeps on then."""
        if self.cache == "here":
            return
        mapped: list[Region] = []
        try:
            for region in self._caches:
                region.map()
                mapped.append(region)
        except BaseException:
            for region in mapped:
                region.unmap()
            raise
        for region in self._caches:
            region.memory.zero_()
        self.cache = "here"

    def close(self) -> None:
        """Give up everything. Nothing may use it any more."""
        for region in (*self._caches, *([] if self._weights is None else [self._weights])):
            region.close()
        self._caches.clear()
        self._weights = self._host = None

    def _copy_of(self, region: Region) -> torch.Tensor:
        # Page-locked memory would be faster, but torch takes a power of two of it, and does not give it back.
        host = torch.empty(region.num_bytes, dtype=torch.uint8)
        host.copy_(region.memory)
        logger.info("weights are on the host, %s of them", in_units(region.num_bytes))
        return host


def _storages(tensors: Iterable[torch.Tensor], device: torch.device) -> dict[int, int]:
    """Where the memory of those on ``device`` begins, and its bytes: each once, in order."""
    found: dict[int, int] = {}
    for tensor in tensors:
        if tensor.numel() and tensor.device == device:
            storage = tensor.untyped_storage()
            found.setdefault(storage.data_ptr(), storage.nbytes())
    return found


def _lying_in(addresses: Iterable[int]) -> dict[int, list[torch.Tensor]]:
    """All tensors of this process by which of ``addresses`` their memory begins at."""
    found: dict[int, list[torch.Tensor]] = {address: [] for address in addresses}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.layout == torch.strided and thing.device.type != "meta":
            lies = found.get(thing.untyped_storage().data_ptr())
            if lies is not None:
                lies.append(thing)
    return found


@torch.inference_mode()
def _move(tensors: list[torch.Tensor], memory: torch.Tensor, start: int, size: int) -> None:
    """The memory of ``tensors``, of ``size`` bytes, to ``start`` bytes behind the begin of ``memory``."""
    old = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(tensors[0].untyped_storage())
    memory[start : start + size].copy_(old)
    for tensor in tensors:
        offset = start // tensor.element_size() + tensor.storage_offset()
        tensor.set_(memory.untyped_storage(), offset, tensor.shape, tensor.stride())


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
