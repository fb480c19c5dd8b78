"""Copies of whole blocks between the pool of the workers and other memory."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol


class Copy(NamedTuple):
    """A block of the pool and a slot of host memory, in whichever direction."""

    block_id: int
    slot: int


class BlockCopier(Protocol):
    """What an executor offers. Copies run on a thread of their own, beside steps, on every worker, each of its part of a block;
    the same slots at all of them. ``block_bytes``: of a block, over all layers and workers.

    Whoever asks sees to it that no step writes a block while it is copied from, and none reads one while it is copied to. Futures
    raise OSError or MemoryError where the copy could not be made; then nothing is known of its target.
    """

    block_bytes: int

    def reserve(self, num_slots: int) -> Future[None]:
        """Allocate so many slots of host memory, once."""

    def save(self, copies: Sequence[Copy]) -> "Future[None]":
        """Pool to host."""

    def load(self, copies: Sequence[Copy]) -> "Future[None]":
        """Host to pool."""

    def read(self, block_ids: Sequence[int]) -> "Future[list[bytes]]":
        """The bytes of blocks of the pool, those of the workers one behind the other."""

    def write(self, block_ids: Sequence[int], contents: "Sequence[bytes | memoryview]") -> "Future[None]":
        """Bytes that ``read`` gave, into blocks of the pool."""

    def read_slots(self, slots: Sequence[int]) -> "Future[list[bytes]]":
        """The bytes of slots of the host."""

    def write_slots(self, slots: Sequence[int], contents: "Sequence[bytes | memoryview]") -> "Future[None]":
        """Bytes into slots of the host."""
