"""Interfaces of KV transfer: connectors that load and save blocks, block copiers, and peers."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from penstock_common.types.kv_transfer import BlockName, KvMedium
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig
from penstock_enginecore.core.request import Request

# Copies of blocks between the workers' KV cache and other memory.

_BATCH_BYTES = 8 << 20
"""Maximum size in bytes of the blocks that are copied together. A limit is needed so that later copies do not wait
long.
"""
Done = Callable[["Future[Any]"], None]
Follow = Callable[["Future[Any]", Done], None]
"""Function with a copy's future and a callback. It calls the callback on the busy loop's thread once the future is
done.
"""


def batch_of(block_bytes: int) -> int:
    """Return the number of blocks of ``block_bytes`` bytes to copy together."""
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
    """Copies KV blocks, or states of recurrent layers as blocks of another size. The executor provides one copier for
    each once the KV cache is allocated. Thread-safe.

    Copies run on their own thread, concurrently with steps. Every worker copies its part of a block, and all workers
    use the same slot numbers. Copies are made in call order. A copy begins after all steps that were started before the
    copy was requested. It therefore includes everything that those steps write. The caller must ensure that no later
    step writes a block while a copy reads it, or reads a block while a copy writes it. If a future raises an error, the
    content of the copy's target is undefined.

    Two engines can use each other's blocks if ``order`` and ``numerics`` are equal.

    Attributes:
        block_bytes: Bytes of a block over all layers and workers.
        order: Order of the numbers in a block.
        numerics: Everything known that affects the computed values.
    """

    block_bytes: int
    order: str
    numerics: str

    def reserve(self, num_slots: int) -> Future[None]:
        """Allocate ``num_slots`` slots of host memory. Must be called only once."""

    def save(self, copies: Sequence[Copy]) -> "Future[None]":
        """Copy blocks from the pool to host memory."""

    def load(self, copies: Sequence[Copy]) -> "Future[list[int]]":
        """Copy blocks from host memory to the pool. Return the slots whose content is damaged. The content of their
        blocks is undefined. Only states have checksums, so blocks never count as damaged.
        """

    def read(self, block_ids: Sequence[int]) -> "Future[list[bytes]]":
        """Return the bytes of blocks of the pool. The parts of all workers are concatenated."""

    def write(self, block_ids: Sequence[int], contents: "Sequence[bytes | memoryview]") -> "Future[None]":
        """Write ``contents``, as returned by ``read``, to blocks of the pool."""

    def read_slots(self, slots: Sequence[int]) -> "Future[list[bytes | None]]":
        """Return the bytes of slots of host memory, and None for a damaged slot."""

    def write_slots(self, slots: Sequence[int], contents: "Sequence[bytes | memoryview]") -> "Future[None]":
        """Write bytes to slots of host memory."""


class Place(NamedTuple):
    """A block of the pool, and the name of its current or future content."""

    name: BlockName
    block_id: int


class LoadEnded(NamedTuple):
    """A load that has ended. The load no longer writes to its blocks.

    Attributes:
        load_id: Number of the load.
        arrived: Places whose content arrived complete and verified, with the medium of each place, in the order of the
            load. The content of all other places is undefined.
    """

    load_id: int
    arrived: tuple[tuple[Place, KvMedium], ...]


class BlockHolder(Protocol):
    """A connector's interface to the block pool. Only the busy loop's thread may call the methods."""

    @property
    def num_spare(self) -> int:
        """Number of additional blocks that a connector may hold, because requests do not need these blocks now."""

    def hold(self, place: Place) -> bool:
        """Hold a block until ``release``, so that its content stays. Return False if the block no longer has this
        content, or if a request uses the block.
        """

    def release(self, place: Place) -> None:
        """Release a held block."""

    def findable(self, medium: KvMedium, name: BlockName, is_there: bool) -> None:
        """Report that a block outside the pool became findable, or was lost. Routers use these reports to send prompts
        to engines that have the prompts' blocks.
        """


class KVConnector(Protocol):
    """Loads blocks that are not in the pool. The methods do not block and do not raise errors. If the connector cannot
    load a block, the engine computes it.

    Only the busy loop's thread calls the methods, except for ``check``. When a load has ended, the connector calls the
    ``wake`` function that it was created with, on any thread.
    """

    def attach(self, blocks: BlockHolder) -> None:
        """Set the block pool. Called once, before all other methods."""

    def attach_states(self, states: BlockHolder) -> None:
        """Set the slots of states. Called once after ``attach``, if the model has recurrent layers. From then on, names
        with ``STATE_GROUP`` are names of states, whose ids are slots. Connectors of plugins need not have this method,
        because the engine refuses them for such models.
        """

    def check(self, params: Mapping[str, Any]) -> None:
        """Validate ``kv_transfer_params`` before the request is queued. Thread-safe. Raises InvalidArgument, or
        Unimplemented if the connector accepts no parameters.
        """

    def answer(self, request: Request) -> Mapping[str, Any] | None:
        """Return the ``kv_transfer_params`` for the response to a request that ended normally, or None. The request
        still has its blocks during the call.
        """

    def lookup(self, request: Request, names: Sequence[Sequence[BlockName]]) -> int:
        """Return the number of consecutive block positions, from the first, whose blocks can be loaded.

        ``names`` has, for each block position, the names of the needed blocks of all groups. The method is called
        often, and must have no side effects.
        """

    def seconds(self, request: Request, names: Sequence[BlockName]) -> float:
        """Estimate the seconds to load these blocks from past measurements. Returns 0 if there are no measurements."""

    def load(self, request: Request, places: Sequence[Place]) -> int:
        """Begin to load blocks into ``places``, and return the number of the load. The connector may write to the
        places until ``take_ended`` returns the load.
        """

    def abandon(self, load_id: int) -> None:
        """Abandon a load. The load ends once its copies in flight have ended."""

    def opened(self, request: Request) -> None:
        """Handle a new request. If the request has a source, keep the source's lease alive until the request starts."""

    def closed(self, request: Request) -> None:
        """Handle the end or move of a request. The request's source is not needed any more."""

    def on_cached(self, places: Sequence[Place]) -> None:
        """Handle blocks that became findable in the pool."""

    def on_freed(self, places: Sequence[Place]) -> None:
        """Handle findable blocks that lost their last reference. The pool may evict such a block at any time, except
        while a connector holds the block.
        """

    def on_evicted(self, places: Sequence[Place]) -> None:
        """Handle blocks that were evicted from the pool."""

    def take_ended(self) -> list[LoadEnded]:
        """Return the loads that have ended since the last call. Each load is returned once. The method is called in
        every step. It also releases the blocks of finished copies, and begins new copies.
        """

    @property
    def has_news(self) -> bool:
        """Whether ``take_ended`` has events to process. The property must be cheap."""

    @property
    def num_held_blocks(self) -> int:
        """Number of blocks of the pool that the connector holds."""

    def settle(self) -> None:
        """Wait until no copy is in flight, and begin no new copies. After that, all loads have ended, and
        ``take_ended`` returns them.
        """

    def reset(self) -> None:
        """Drop all stored blocks, because weights or adapters have changed. The pool drops its cached blocks as well."""

    def shutdown(self) -> None:
        """Stop background work. Idempotent."""


class PluggedConnector(KVConnector, Protocol):
    """A connector from a plugin, which replaces the engine's own connector. ``lookup`` and ``load`` find the request's
    parameters in ``request.kv_transfer_params``.
    """

    def begin(self, copier: BlockCopier, kv_cache: KVCacheConfig) -> None:
        """Start the connector. Called after the KV cache was allocated and before the first step. ``copier`` reads and
        writes blocks. Raises ConfigError.
        """


# A connector's interface for loads from other engines.


class PeerBlock(NamedTuple):
    """A verified block that has arrived from another engine.

    Attributes:
        place: Index of the block among the requested blocks.
        data: Content for ``BlockCopier.write``. It is valid until ``done`` is called.
        done: Function that the receiver must call once, on any thread. After the call, the buffer is reused.
    """

    place: int
    data: "bytes | memoryview"
    done: Callable[[], None]


class PeerTier(Protocol):
    """Loads blocks from the sources of requests. The methods do not block and do not raise errors. Blocks that cannot
    be loaded do not arrive.

    Only the busy loop's thread calls the methods. The callbacks ``arrived`` and ``ended`` are called on another thread,
    and must return without waiting.
    """

    def opened(self, request: Request) -> None:
        """Handle a new request. If the request has an allowed source, open a pull, which renews the source's lease."""

    def closed(self, request: Request) -> None:
        """Release the lease of the request's source, and end the pull and its fetches. If the request has no pull, do
        nothing.
        """

    def num_blocks(self, request: Request) -> int:
        """Return the expected number of leading block positions for which the source has the needed blocks of all
        groups. Return 0 if there is no source, or if the source has failed. The method must be cheap.
        """

    def fetch(
        self,
        request: Request,
        names: Sequence[BlockName],
        arrived: Callable[[Sequence[PeerBlock]], None],
        ended: Callable[[], None],
    ) -> int:
        """Request the blocks ``names``, in the order in which they are needed. No name may occur twice. Return the
        number of the fetch.

        ``arrived`` is called with batches of blocks, in any order. ``ended`` is called once after the last batch, even
        if no block arrived.
        """

    def abandon(self, fetch_id: int) -> None:
        """Abandon the blocks of a fetch that have not arrived. If ``ended`` has not been called yet, it is called soon.
        No block arrives after that.
        """
