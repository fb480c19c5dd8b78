"""Interfaces of KV transfer: connectors that load and save blocks, block copiers, and peers."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from penstock_common.types.kv_transfer import BlockName, KvMedium
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig
from penstock_enginecore.core.request import Request

# Copies of whole blocks between the workers' KV cache and other memory.

_BATCH_BYTES = 8 << 20
"""Maximum bytes of blocks that are copied together, so that later copies do not wait long."""
Done = Callable[["Future[Any]"], None]
Follow = Callable[["Future[Any]", Done], None]
"""Function that calls the second argument on the busy loop's thread once the copy's future is done."""


def batch_of(block_bytes: int) -> int:
    """Return how many blocks to copy together."""
    return max(1, _BATCH_BYTES // block_bytes)


class Copy(NamedTuple):
    """A block of the pool and a slot of host memory, for a copy in either direction."""

    block_id: int
    slot: int


class BlockFacts(NamedTuple):
    """Layout of a block, or of a worker's part of a block.

    Attributes:
        num_bytes: Bytes over all layers.
        order: Order of the numbers in a block.
        numerics: Everything known that affects the computed values.
    """

    num_bytes: int
    order: str
    numerics: str


class BlockCopier(Protocol):
    """Copies KV blocks. The executor provides it once the KV cache is allocated. Thread-safe.

    Copies run on their own thread, concurrently with steps. Every worker copies its part of a block, and all workers
    use the same slots. A copy begins after the steps that were started before it, and copies are made in call order. A
    copy therefore sees everything that steps in flight write. The caller must ensure that no later step writes a block
    while it is read, or reads a block while it is written. If a future raises, the content of the copy's target is
    undefined.

    Blocks of two engines are interchangeable if ``order`` and ``numerics`` are equal.

    Attributes:
        block_bytes: Bytes of a block over all layers and workers.
        order: Order of the numbers in a block.
        numerics: Everything known that affects the computed values.
    """

    block_bytes: int
    order: str
    numerics: str

    def reserve(self, num_slots: int) -> Future[None]:
        """Allocate ``num_slots`` slots of host memory. Called once."""

    def save(self, copies: Sequence[Copy]) -> "Future[None]":
        """Copy from the pool to host memory."""

    def load(self, copies: Sequence[Copy]) -> "Future[None]":
        """Copy from host memory to the pool."""

    def read(self, block_ids: Sequence[int]) -> "Future[list[bytes]]":
        """Return the bytes of blocks of the pool. The parts of all workers are concatenated."""

    def write(self, block_ids: Sequence[int], contents: "Sequence[bytes | memoryview]") -> "Future[None]":
        """Write bytes that ``read`` returned to blocks of the pool."""

    def read_slots(self, slots: Sequence[int]) -> "Future[list[bytes]]":
        """Return the bytes of slots of host memory."""

    def write_slots(self, slots: Sequence[int], contents: "Sequence[bytes | memoryview]") -> "Future[None]":
        """Write bytes to slots of host memory."""


class Place(NamedTuple):
    """A block of the pool, and the name of the content that it has or will get."""

    name: BlockName
    block_id: int


class LoadEnded(NamedTuple):
    """A load that has ended. Its blocks are no longer written.

    Attributes:
        load_id: Number of the load.
        arrived: Places whose content arrived complete and verified, with their medium, in the order of the load. The
            other places hold nothing.
    """

    load_id: int
    arrived: tuple[tuple[Place, KvMedium], ...]


class BlockHolder(Protocol):
    """A connector's interface to the block pool. Called on the busy loop's thread."""

    @property
    def num_spare(self) -> int:
        """Number of blocks that a connector may additionally hold, because requests do not need them now."""

    def hold(self, place: Place) -> bool:
        """Hold a block that has this content and belongs to no request, until ``release``. Return False if the content
        has changed, or if a request uses the block.
        """

    def release(self, place: Place) -> None:
        """Release a held block."""

    def findable(self, medium: KvMedium, name: BlockName, is_there: bool) -> None:
        """Report that a block outside the pool became findable, or was lost. Routers use this to send prompts to
        engines that have their blocks.
        """


class KVConnector(Protocol):
    """Loads blocks that are not in the pool. Its methods do not block and do not raise: blocks that it cannot load are
    computed.

    All calls except ``check`` come from the busy loop's thread. When a load has ended, the connector calls its
    creator's ``wake`` on any thread.
    """

    def attach(self, blocks: BlockHolder) -> None:
        """Set the block pool. Called once, before everything else."""

    def check(self, params: Mapping[str, Any]) -> None:
        """Validate ``kv_transfer_params`` before the request is queued. Thread-safe. Raises InvalidArgument, or
        Unimplemented if the connector accepts no parameters.
        """

    def answer(self, request: Request) -> Mapping[str, Any] | None:
        """Return the ``kv_transfer_params`` for the response to a request that ended normally, or None. The request
        still has its blocks.
        """

    def lookup(self, request: Request, names: Sequence[Sequence[BlockName]]) -> int:
        """Return how many consecutive blocks can be loaded.

        ``names`` has, for each block position, the blocks of all groups that are needed there. Called often, and must
        have no side effects.
        """

    def seconds(self, request: Request, names: Sequence[BlockName]) -> float:
        """Estimate the seconds to load these blocks from past measurements. Returns 0 if there are no measurements."""

    def load(self, request: Request, places: Sequence[Place]) -> int:
        """Begin to load these blocks, and return the number of the load. The blocks are written to until ``take_ended``
        returns the load.
        """

    def abandon(self, load_id: int) -> None:
        """Abandon a load. It ends once its copies in flight have ended."""

    def opened(self, request: Request) -> None:
        """Note a new request. If it has a source, renew the source's lease until the request starts."""

    def closed(self, request: Request) -> None:
        """Note that a request has ended or has been moved, so its source is not needed any more."""

    def on_cached(self, places: Sequence[Place]) -> None:
        """Note that blocks became findable in the pool."""

    def on_freed(self, places: Sequence[Place]) -> None:
        """Note that findable blocks lost their last reference. The pool may evict them at any time unless they are
        held.
        """

    def on_evicted(self, places: Sequence[Place]) -> None:
        """Note that blocks were evicted."""

    def take_ended(self) -> list[LoadEnded]:
        """Return the loads that have ended since the last call, each once. Called in every step; it also releases the
        blocks of finished copies, and begins new copies.
        """

    @property
    def has_news(self) -> bool:
        """Whether ``take_ended`` has events to process. Cheap."""

    @property
    def num_held_blocks(self) -> int:
        """Number of blocks of the pool that the connector holds."""

    def settle(self) -> None:
        """Wait until no copy is in flight, without beginning new ones. All loads have then ended, and ``take_ended``
        returns them.
        """

    def reset(self) -> None:
        """Drop all stored blocks, as the pool does, because weights or adapters have changed."""

    def shutdown(self) -> None:
        """Stop background work. Idempotent."""


class PluggedConnector(KVConnector, Protocol):
    """A connector that a plugin adds, used instead of the engine's own. ``lookup`` and ``load`` find the request's
    parameters in ``request.kv_transfer_params``.
    """

    def begin(self, copier: BlockCopier, kv_cache: KVCacheConfig) -> None:
        """Begin, after the KV cache was allocated and before the first step. ``copier`` reads and writes blocks. Raises
        ConfigError.
        """


# Loads from other engines, as a connector sees them.


class PeerBlock(NamedTuple):
    """A verified block that has arrived from another engine.

    Attributes:
        place: Index of the block among the requested ones.
        data: The bytes, as ``BlockCopier.write`` takes them. They are valid until ``done`` is called.
        done: Must be called once, on any thread. The buffer is then reused.
    """

    place: int
    data: "bytes | memoryview"
    done: Callable[[], None]


class PeerTier(Protocol):
    """Loads blocks from the sources of requests. Its methods do not block and do not raise: blocks that it cannot load
    do not arrive.

    All calls come from the busy loop's thread. ``arrived`` and ``ended`` are called on another thread, and must return
    at once.
    """

    def opened(self, request: Request) -> None:
        """Note a new request. If it has an allowed source, open a pull, which renews the lease."""

    def closed(self, request: Request) -> None:
        """Release the lease of the request's source, and end the pull and its fetches. Do nothing without a pull."""

    def num_blocks(self, request: Request) -> int:
        """Return how many leading blocks the source is expected to have, in all groups that need them. 0 without a
        source, or after it failed. Cheap.
        """

    def fetch(
        self,
        request: Request,
        names: Sequence[BlockName],
        arrived: Callable[[Sequence[PeerBlock]], None],
        ended: Callable[[], None],
    ) -> int:
        """Request blocks, each once, most wanted first, and return the number of the fetch.

        ``arrived`` is called with blocks in any order and in any batches. ``ended`` is called once after that, even if
        no block arrived.
        """

    def abandon(self, fetch_id: int) -> None:
        """Abandon the rest of a fetch. ``ended`` is called soon, if it was not yet, and no block arrives after that."""
