"""The CUDA driver's virtual memory: addresses and the memory behind them, apart from each other."""

from typing import Any, Protocol

import torch


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
