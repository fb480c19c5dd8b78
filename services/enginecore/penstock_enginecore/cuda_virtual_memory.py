"""GPU memory for weights and KV cache that is freed while an engine sleeps, and mapped again at the same addresses."""

import gc
import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

import torch

from penstock_common.memory import in_units


class Driver(Protocol):
    """Bytes are multiples of ``granularity``, and so are addresses. Each call raises MemoryError where the device has too little,
    and RuntimeError for what else goes wrong.
    """

    device: torch.device
    granularity: int

    def reserve(self, num_bytes: int) -> int:
        """An address with so many behind it that nobody else gets. No memory is taken."""

    def free(self, address: int, num_bytes: int) -> None:
        """Give up what was reserved, behind which no memory is left."""

    def create(self, num_bytes: int) -> int:
        """Take memory of the device: a handle."""

    def release(self, handle: int) -> None:
        """Give it back, once it is behind no address."""

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """Put the memory of ``handle`` behind an address, to read and to write."""

    def unmap(self, address: int, num_bytes: int) -> None:
        """Take it away from there, once the device has finished what it was told."""

    def tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        """uint8 ``[num_bytes]`` at ``address``, the first of which has memory behind it."""


class CudaDriver:
    """That of CUDA, by the bindings that torch's CUDA builds bring. RuntimeError where they, or the device, do not know it."""

    def __init__(self, device: torch.device) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as e:
            raise RuntimeError(f"the CUDA bindings cannot be imported: {e}") from e
        self._cuda: Any = driver
        self.device = device
        torch.cuda.synchronize(device)  # which makes the context that is used below
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device.index or 0
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = location
        self._access = driver.CUmemAccessDesc()
        self._access.location = location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        kind = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.granularity = int(self._done(driver.cuMemGetAllocationGranularity(self._properties, kind)))

    def reserve(self, num_bytes: int) -> int:
        """``cuMemAddressReserve``."""
        return int(self._done(self._cuda.cuMemAddressReserve(num_bytes, self.granularity, 0, 0)))

    def free(self, address: int, num_bytes: int) -> None:
        """``cuMemAddressFree``."""
        self._done(self._cuda.cuMemAddressFree(address, num_bytes))

    def create(self, num_bytes: int) -> int:
        """``cuMemCreate``."""
        return int(self._done(self._cuda.cuMemCreate(num_bytes, self._properties, 0)))

    def release(self, handle: int) -> None:
        """``cuMemRelease``."""
        self._done(self._cuda.cuMemRelease(handle))

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """``cuMemMap`` and ``cuMemSetAccess``."""
        self._done(self._cuda.cuMemMap(address, num_bytes, 0, handle, 0))
        self._done(self._cuda.cuMemSetAccess(address, num_bytes, [self._access], 1))

    def unmap(self, address: int, num_bytes: int) -> None:
        """``cuMemUnmap``, behind what runs."""
        torch.cuda.synchronize(self.device)
        self._done(self._cuda.cuMemUnmap(address, num_bytes))

    def tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        """Shares the memory: nothing is copied, and nothing freed with it."""
        return torch.as_tensor(_Memory(address, num_bytes), device=self.device)

    def _done(self, answer: tuple[Any, ...]) -> Any:
        """What a call gave, behind its status."""
        status, *values = answer
        results = self._cuda.CUresult
        if status == results.CUDA_ERROR_OUT_OF_MEMORY:
            raise MemoryError("the device has too little memory left")
        if status != results.CUDA_SUCCESS:
            raise RuntimeError(f"the CUDA driver's virtual memory: {results(status).name}")
        return values[0] if values else None


class _Memory:
    """What torch makes a tensor of that shares its memory."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


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


# Weights and KV cache that leave the device while an engine sleeps, and come back to where they were.
#
# What was captured goes on knowing their addresses: an engine that wakes replays the graphs that it had.

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
