"""GPU memory for weights and KV cache. While an engine sleeps, this memory is freed. When the engine wakes, memory is
mapped again at the same addresses.
"""

import gc
import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

import torch

from penstock_common.memory import in_units


class Driver(Protocol):
    """Low-level calls for GPU virtual memory, for use by ``Region``. All addresses and sizes are multiples of
    ``granularity`` bytes. Every call raises MemoryError if the device has too little memory, and RuntimeError after any
    other failure.
    """

    device: torch.device
    granularity: int

    def reserve(self, num_bytes: int) -> int:
        """Reserve an address range of ``num_bytes`` bytes and return its start. A reserved range uses no device
        memory.
        """

    def free(self, address: int, num_bytes: int) -> None:
        """Free a reserved address range. No memory may be mapped in it."""

    def create(self, num_bytes: int) -> int:
        """Allocate device memory and return its handle."""

    def release(self, handle: int) -> None:
        """Free the device memory of a handle. The memory must not be mapped at any address."""

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """Map the memory of ``handle`` at ``address``, for reading and writing."""

    def unmap(self, address: int, num_bytes: int) -> None:
        """Wait until the device has finished its queued work, then unmap the memory."""

    def tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        """Return a uint8 tensor ``[num_bytes]`` at ``address``. At least its first byte must be mapped."""


class CudaDriver:
    """CUDA driver calls, through the bindings that torch's CUDA builds install.

    Raises RuntimeError if the bindings or the device do not support virtual memory.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as e:
            raise RuntimeError(f"the CUDA bindings cannot be imported: {e}") from e
        self._cuda: Any = driver
        self.device = device
        torch.cuda.synchronize(device)  # This call creates the CUDA context that the calls below need.
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
        """Call ``cuMemAddressReserve``."""
        return int(self._done(self._cuda.cuMemAddressReserve(num_bytes, self.granularity, 0, 0)))

    def free(self, address: int, num_bytes: int) -> None:
        """Call ``cuMemAddressFree``."""
        self._done(self._cuda.cuMemAddressFree(address, num_bytes))

    def create(self, num_bytes: int) -> int:
        """Call ``cuMemCreate``."""
        return int(self._done(self._cuda.cuMemCreate(num_bytes, self._properties, 0)))

    def release(self, handle: int) -> None:
        """Call ``cuMemRelease``."""
        self._done(self._cuda.cuMemRelease(handle))

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """Call ``cuMemMap`` and ``cuMemSetAccess``."""
        self._done(self._cuda.cuMemMap(address, num_bytes, 0, handle, 0))
        self._done(self._cuda.cuMemSetAccess(address, num_bytes, [self._access], 1))

    def unmap(self, address: int, num_bytes: int) -> None:
        """Call ``cuMemUnmap`` after the device has finished its queued work."""
        torch.cuda.synchronize(self.device)
        self._done(self._cuda.cuMemUnmap(address, num_bytes))

    def tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        """Return a tensor that shares the memory. Nothing is copied, and freeing the tensor does not free the memory."""
        return torch.as_tensor(_Memory(address, num_bytes), device=self.device)

    def _done(self, answer: tuple[Any, ...]) -> Any:
        """Return the value after the status in the results of a driver call, or None if there is no such value. Raises
        an error if the status reports a failure.
        """
        status, *values = answer
        results = self._cuda.CUresult
        if status == results.CUDA_ERROR_OUT_OF_MEMORY:
            raise MemoryError("the device has too little memory left")
        if status != results.CUDA_SUCCESS:
            raise RuntimeError(f"CUDA virtual memory call failed: {results(status).name}")
        return values[0] if values else None


class _Memory:
    """Object from which torch makes a tensor that shares existing memory."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


CHUNK = 256 * 2**20
"""Number of bytes that are allocated or freed in one call."""


class Region:
    """Address range of at least ``num_bytes`` bytes. The addresses stay the same for the life of the region.

    A new region, and a region that sleeps, has no memory. If the device has too little memory, a call raises
    MemoryError and leaves the region unchanged.
    """

    def __init__(self, driver: Driver, num_bytes: int, chunk: int = CHUNK) -> None:
        self._driver = driver
        self._chunk = _whole(chunk, driver.granularity)
        self.num_bytes = _whole(num_bytes, driver.granularity)
        self._address = driver.reserve(self.num_bytes)
        self._handles: list[int] = []
        """Handles of the chunks of the region that have device memory, in the order of addresses."""
        self._memory: torch.Tensor | None = None

    @property
    def mapped_bytes(self) -> int:
        """Number of bytes of the region that have device memory, counted from the start of the region."""
        return min(len(self._handles) * self._chunk, self.num_bytes)

    @property
    def memory(self) -> torch.Tensor:
        """Tensor uint8 ``[num_bytes]``, which is the same for the life of the region. Raises RuntimeError before the
        first ``map``.
        """
        if self._memory is None:
            raise RuntimeError("the region of virtual memory was read before physical memory was mapped to it")
        return self._memory

    def map(self, num_bytes: int | None = None) -> None:
        """Map memory for at least the first ``num_bytes`` bytes, or for the complete region if ``num_bytes`` is None.
        New memory has undefined content.
        """
        wanted, had = self.num_bytes if num_bytes is None else num_bytes, len(self._handles)
        try:
            while self.mapped_bytes < wanted:
                self._map_next()
        except BaseException:
            self._unmap_from(had)
            raise
        if self._memory is None:
            # A tensor that is created outside inference mode can be written to inside and outside this mode.
            with torch.inference_mode(False):
                self._memory = self._driver.tensor(self._address, self.num_bytes)

    def unmap(self) -> None:
        """Free all device memory of the region, but keep its address range."""
        self._unmap_from(0)

    def close(self) -> None:
        """Free the device memory and the address range. The region's tensor must not be used afterwards."""
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
        """Free all chunks except the first ``count``, last chunk first."""
        while len(self._handles) > count:
            end = self.mapped_bytes
            start = (len(self._handles) - 1) * self._chunk
            self._driver.unmap(self._address + start, end - start)
            self._driver.release(self._handles.pop())


def _whole(count: int, unit: int) -> int:
    return -(-max(count, 1) // unit) * unit


# Weights and KV cache of an engine that can sleep. While the engine sleeps, their device memory is freed. After that,
# memory is mapped at the same addresses.
#
# Captured CUDA graphs contain these addresses, so an engine can replay its graphs after it wakes.

logger = logging.getLogger(__name__)

_ALIGNMENT = 256
State = Literal["here", "on the host", "dropped"]


class KeptMemory:
    """State machine for the weights and KV caches of one worker across sleep and wake.

    Args:
        give_back: Function that makes torch's memory allocator return unused memory to the device.
        chunk: Number of bytes that are allocated or freed in one call.
    """

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
        """Move the memory of ``tensors`` into a region, one chunk at a time. May be called only once.

        All other tensors of this process that share memory with ``tensors`` are moved as well.
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
        """Return uninitialized memory ``[rows, columns]`` for a KV cache, in a separate region."""
        size = rows * columns * dtype.itemsize
        region = Region(self._driver, size, self._chunk)
        region.map()
        self._caches.append(region)
        return region.memory[:size].view(dtype).view(rows, columns)

    def sleep(self, level: int) -> None:
        """Free the caches and the weights. Level 1 copies the weights to host memory first; level 2 drops them.

        A level 2 sleep is allowed after a level 1 sleep. Memory that is already freed stays freed.
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
        """Map the weights' memory again. Returns False if the weights must be read from the checkpoint.

        After reading the weights, the caller must call ``weights_are_read``. Raises MemoryError if the device has too
        little memory. In that case, the weights stay without device memory.
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
        """Record that the weights are in device memory again."""
        self._host, self.weights = None, "here"

    def wake_cache(self) -> None:
        """Map the caches' memory again and fill it with zeros. Raises MemoryError if the device has too little memory.
        In that case, the caches stay without device memory.
        """
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
        """Free all device memory and address ranges. The tensors of weights and caches must not be used afterwards."""
        for region in (*self._caches, *([] if self._weights is None else [self._weights])):
            region.close()
        self._caches.clear()
        self._weights = self._host = None

    def _copy_of(self, region: Region) -> torch.Tensor:
        # Copies to page-locked host memory would be faster, but torch rounds its size up to a power of two and never
        # frees it.
        host = torch.empty(region.num_bytes, dtype=torch.uint8)
        host.copy_(region.memory)
        logger.info(
            "copied the model's weights to host memory, because the engine goes to sleep size=%s",
            in_units(region.num_bytes),
        )
        return host


def _storages(tensors: Iterable[torch.Tensor], device: torch.device) -> dict[int, int]:
    """Return the start address and the size in bytes of each storage on ``device`` that ``tensors`` use. Each storage
    is included once, in the order of ``tensors``.
    """
    found: dict[int, int] = {}
    for tensor in tensors:
        if tensor.numel() and tensor.device == device:
            storage = tensor.untyped_storage()
            found.setdefault(storage.data_ptr(), storage.nbytes())
    return found


def _lying_in(addresses: Iterable[int]) -> dict[int, list[torch.Tensor]]:
    """Return all tensors of this process whose storage begins at one of ``addresses``, grouped by this address."""
    found: dict[int, list[torch.Tensor]] = {address: [] for address in addresses}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.layout == torch.strided and thing.device.type != "meta":
            lies = found.get(thing.untyped_storage().data_ptr())
            if lies is not None:
                lies.append(thing)
    return found


@torch.inference_mode()
def _move(tensors: list[torch.Tensor], memory: torch.Tensor, start: int, size: int) -> None:
    """Move the storage of ``tensors``, ``size`` bytes, to the byte offset ``start`` in ``memory``."""
    old = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(tensors[0].untyped_storage())
    memory[start : start + size].copy_(old)
    for tensor in tensors:
        offset = start // tensor.element_size() + tensor.storage_offset()
        tensor.set_(memory.untyped_storage(), offset, tensor.shape, tensor.stride())


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
