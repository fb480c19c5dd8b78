"""A device's virtual memory, simulated on the host. Data is lost when its address is unmapped."""

import torch

LOST = 0xA5
"""Value of each byte that has no memory. As a float, it is a number that no test uses."""


class FakeDriver:
    """A ``Driver`` that refuses calls that a real one does not allow. ``room`` is the device's memory in bytes;
    ``calls`` records the calls.
    """

    device = torch.device("cpu")
    granularity = 64

    def __init__(self, room: int = 2**40) -> None:
        self.room = room
        self.calls: list[str] = []
        self._reserved: dict[int, torch.Tensor] = {}
        self._created: dict[int, int] = {}
        self._mapped: dict[int, tuple[int, int]] = {}
        self._next = 1

    @property
    def used(self) -> int:
        """Number of allocated bytes of the device."""
        return sum(self._created.values())

    @property
    def is_clean(self) -> bool:
        """Whether all memory and addresses were freed."""
        return not (self._reserved or self._created or self._mapped)

    def reserve(self, num_bytes: int) -> int:
        assert num_bytes % self.granularity == 0
        memory = torch.full((num_bytes,), LOST, dtype=torch.uint8)
        self._reserved[memory.data_ptr()] = memory
        return memory.data_ptr()

    def free(self, address: int, num_bytes: int) -> None:
        assert len(self._reserved[address]) == num_bytes
        assert not any(address <= mapped < address + num_bytes for mapped in self._mapped), "memory is left there"
        del self._reserved[address]

    def create(self, num_bytes: int) -> int:
        assert num_bytes > 0
        assert num_bytes % self.granularity == 0
        if self.used + num_bytes > self.room:
            raise MemoryError("the device has too little memory left")
        self.calls.append(f"create {num_bytes}")
        self._next += 1
        self._created[self._next] = num_bytes
        return self._next

    def release(self, handle: int) -> None:
        assert handle not in (mapped for _, mapped in self._mapped.values()), "it is mapped"
        self.calls.append(f"release {self._created.pop(handle)}")

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        assert self._created[handle] == num_bytes
        assert handle not in (mapped for _, mapped in self._mapped.values()), "it is mapped already"
        self._behind(address, num_bytes)
        for begin, (size, _) in self._mapped.items():
            assert address + num_bytes <= begin or begin + size <= address, "there is memory already"
        self._mapped[address] = num_bytes, handle

    def unmap(self, address: int, num_bytes: int) -> None:
        size, _ = self._mapped.pop(address)
        assert size == num_bytes
        self._behind(address, num_bytes).fill_(LOST)

    def tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        assert address in self._mapped, "nothing stands behind its first byte"
        memory = self._reserved[address]
        assert len(memory) == num_bytes
        return memory

    def _behind(self, address: int, num_bytes: int) -> torch.Tensor:
        for begin, memory in self._reserved.items():
            if begin <= address and address + num_bytes <= begin + len(memory):
                return memory[address - begin : address - begin + num_bytes]
        raise AssertionError("the address range is not reserved")
