"""Copies of whole blocks between the pool of the workers and other memory."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

_BATCH_BYTES = 8 << 20
"""Of blocks that are copied together: what comes behind them waits for no more."""
Done = Callable[["Future[Any]"], None]
Follow = Callable[["Future[Any]", Done], None]
"""Has something called on the busy loop's thread once a copy is over."""


def batch_of(block_bytes: int) -> int:
    """How many blocks are copied together."""
    return max(1, _BATCH_BYTES // block_bytes)


class Copy(NamedTuple):
    """A block of the pool and a slot of host memory, in whichever direction."""

    block_id: int
    slot: int


class BlockFacts(NamedTuple):
    """What a block is, or a worker's part of it. ``num_bytes``: over all layers. ``order``: how numbers lie in it; ``numerics``:
    what computes them, as far as that is known.
    """

    num_bytes: int
    order: str
    numerics: str


class BlockCopier(Protocol):
    """What an executor offers, to any thread, once the KV cache is there. Copies run on a thread of their own, beside steps, on
    every worker, each of its part of a block; the same slots at all of them. They begin behind the steps that were started
    before, and are made in the order of the calls: what a step in flight still writes to a block that is copied to,
    or from, is there before.

    Whoever asks sees to it that no later step writes a block while it is copied from, and none reads one while it is copied to.
    Futures raise what went wrong; then nothing is known of a copy's target.

    ``block_bytes``: of a block, over all layers and workers. ``order``: how numbers lie in a block; ``numerics``: what computes
    them, where that is known: blocks of engines in which both are the same are interchangeable.
    """

    block_bytes: int
    order: str
    numerics: str

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
