"""Interfaces of KV transfer: connectors that load and save blocks, block copiers, and peers."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from penstock_common.types.kv_transfer import BlockName, KvMedium
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig
from penstock_enginecore.core.request import Request

# Copies of blocks between the workers' KV cache and other memory.

_BATCH_BYTES = 8 << 20
"""Maximum total size in bytes of the blocks that are copied together. The limit keeps later copies from waiting long.
"""
Content = bytes | memoryview
"""Content of a block. It is a memoryview if the block was read from a GPU or a file."""
Done = Callable[["Future[Any]"], None]
Follow = Callable[["Future[Any]", Done], None]
"""Function that gets a copy's future and a callback. The function calls the callback on the busy loop's thread once the
future is done.
"""


def batch_of(block_bytes: int) -> int:
    """Return how many blocks of ``block_bytes`` bytes to copy together."""
    return max(1, _BATCH_BYTES // block_bytes)


class Copy(NamedTuple):
    """A block of the pool and a slot of host memory, for a copy in either direction."""

    block_id: int
    slot: int


class BlockFacts(NamedTuple):
    """Layout of a block, or of a worker's part of a block.

    Attributes:
        num_bytes: Size in bytes, over all layers.
        order: Text that describes the order of the numbers in a block.
        numerics: Text that describes everything known that affects how keys and values are rounded.
    """

    num_bytes: int
    order: str
    numerics: str


class BlockCopier(Protocol):
    """Copies KV blocks, or states of recurrent layers, which are copied like blocks of another size. The executor
    provides one copier for blocks and one for states, once the KV cache is allocated. Thread-safe.

    Copies run on their own thread, concurrently with steps. Every worker copies its part of a block, and all workers
    use the same slot numbers. Copies run in the order of the calls. A copy begins after all steps that were started
    before the copy was requested. The copy therefore includes everything that those steps write. The caller must ensure
    that no later step writes a block while a copy reads it, or reads a block while a copy writes it. If a future raises
    an error, the content of the copy's target is undefined.

    Two engines can use each other's blocks if ``order`` and ``numerics`` are equal.

    Attributes:
        block_bytes: Size of a block in bytes, over all layers and workers.
        order: Text that describes the order of the numbers in a block.
        numerics: Text that describes everything known that affects how keys and values are rounded.
    """

    block_bytes: int
    order: str
    numerics: str

    def reserve(self, num_slots: int) -> Future[None]:
        """Allocate ``num_slots`` slots of host memory, each for one block. The method must be called only once."""

    def save(self, copies: Sequence[Copy]) -> "Future[None]":
        """Copy blocks from the pool to host memory."""

    def load(self, copies: Sequence[Copy]) -> "Future[list[int]]":
        """Copy blocks from host memory to the pool. Return the slots whose content is damaged. The content of the
        blocks that were loaded from these slots is undefined. Only states have checksums, so blocks never count as
        damaged.
        """

    def read(self, block_ids: Sequence[int]) -> "Future[list[Content]]":
        """Return the contents of blocks of the pool. The parts of all workers are concatenated. The caller may keep the
        contents.
        """

    def write(self, block_ids: Sequence[int], contents: Sequence[Content]) -> "Future[None]":
        """Write ``contents``, as returned by ``read``, to blocks of the pool."""

    def read_slots(self, slots: Sequence[int]) -> "Future[list[bytes | None]]":
        """Return the bytes of slots of host memory, and None for a damaged slot."""

    def write_slots(self, slots: Sequence[int], contents: Sequence[Content]) -> "Future[None]":
        """Write ``contents`` to slots of host memory."""


class Place(NamedTuple):
    """A block of the pool, and the name (group and hash) of its current or future content."""

    name: BlockName
    block_id: int


class LoadEnded(NamedTuple):
    """Report that a load has ended. The load no longer writes to its blocks.

    Attributes:
        load_id: Number of the load.
        arrived: Places whose content arrived complete and verified, and the medium from which each content came, in the
            order of the load. The content of all other places is undefined.
    """

    load_id: int
    arrived: tuple[tuple[Place, KvMedium], ...]


class BlockHolder(Protocol):
    """Interface through which a connector uses the block pool. Only the busy loop's thread may call the methods."""

    @property
    def num_spare(self) -> int:
        """Number of additional blocks that a connector may hold, because requests do not need these blocks now."""

    def hold(self, place: Place) -> bool:
        """Keep a block in the pool until ``release``, so that its content stays. Return False if the block no longer
        has this content, or if a request uses the block.
        """

    def release(self, place: Place) -> None:
        """Release a block that ``hold`` kept."""

    def findable(self, medium: KvMedium, name: BlockName, is_there: bool) -> None:
        """Report that a block in a medium outside the pool became findable, or that the block was lost. Routers use
        these reports to send a prompt to an engine that has KV blocks of the prompt.
        """


class KVConnector(Protocol):
    """Interface of components that load KV blocks that are not in the pool. The methods do not block and do not raise
    errors. If the connector cannot load a block, the engine computes it.

    Only the busy loop's thread calls the methods, except for ``check``. When a load has ended, the connector calls the
    function ``wake`` with which it was created. The call may come on any thread.
    """

    def attach(self, blocks: BlockHolder) -> None:
        """Set the interface to the block pool. The engine calls this method once, before all other methods."""

    def attach_states(self, states: BlockHolder) -> None:
        """Set the interface to the slots of recurrent states. The engine calls this method once after ``attach``, if
        the model has recurrent layers. After this call, a block name with the group ``STATE_GROUP`` names a state, and
        its block id is a slot number. A plugin's connector need not have this method, because the engine refuses such
        connectors for models with recurrent layers.
        """

    def check(self, params: Mapping[str, Any]) -> None:
        """Validate ``kv_transfer_params`` before the request is queued. Thread-safe. Raises InvalidArgument, or
        Unimplemented if the connector accepts no parameters.
        """

    def answer(self, request: Request) -> Mapping[str, Any] | None:
        """Return the ``kv_transfer_params`` for the response to a request that ended normally, or None. The request
        still has its KV blocks during the call.
        """

    def lookup(self, request: Request, names: Sequence[Sequence[BlockName]]) -> int:
        """Return the number of consecutive block positions, from the first, for which all needed blocks can be loaded.

        ``names`` has, for each position, the names of the needed blocks of all groups. The method is called
        often, and must have no side effects.
        """

    def seconds(self, request: Request, names: Sequence[BlockName]) -> float:
        """Return an estimate of the time in seconds to load these blocks, from past measurements. The result is 0 if
        there are no measurements.
        """

    def load(self, request: Request, places: Sequence[Place]) -> int:
        """Begin to load blocks into ``places``, and return a number that identifies the load. The connector may write
        to the places until ``take_ended`` returns the load.
        """

    def abandon(self, load_id: int) -> None:
        """Stop a load whose blocks are not needed any more. The load ends once its copies in flight have ended."""

    def opened(self, request: Request) -> None:
        """Handle a new request. If the request has a source (another engine with its blocks), keep the source's lease
        alive until ``closed`` is called.
        """

    def closed(self, request: Request) -> None:
        """Handle the end of a request, or its move to another engine. The request's source is not needed any more."""

    def on_cached(self, places: Sequence[Place]) -> None:
        """Handle blocks that became findable in the pool."""

    def on_freed(self, places: Sequence[Place]) -> None:
        """Handle findable blocks of the pool that lost their last reference. The pool may evict such a block at any
        time, except while a connector holds the block.
        """

    def on_evicted(self, places: Sequence[Place]) -> None:
        """Handle blocks that were evicted from the pool."""

    def take_ended(self) -> list[LoadEnded]:
        """Return the loads that have ended since the last call. Each load is returned once. The method is called in
        every step. The method also releases the blocks of finished copies, and begins new copies.
        """

    @property
    def has_news(self) -> bool:
        """Whether ``take_ended`` has events to process. Reading the property must take little time."""

    @property
    def num_held_blocks(self) -> int:
        """Number of blocks of the pool that the connector holds."""

    def settle(self) -> None:
        """End all loads, and wait until no copy is in flight. The method begins no new copies. The next call of
        ``take_ended`` returns the ended loads.
        """

    def reset(self) -> None:
        """Drop all stored blocks, because weights or LoRA adapters have changed. The pool drops its cached blocks as
        well.
        """

    def shutdown(self) -> None:
        """Stop background work. Idempotent."""


class PluggedConnector(KVConnector, Protocol):
    """A connector from a plugin, which replaces the engine's own connector. ``lookup`` and ``load`` find the request's
    parameters in ``request.kv_transfer_params``.
    """

    def begin(self, copier: BlockCopier, kv_cache: KVCacheConfig) -> None:
        """Start the connector. The engine calls this method after it has allocated the KV cache and before the first
        step. ``copier`` reads and writes blocks of the pool. Raises ConfigError.
        """


# Interface through which a connector loads blocks from other engines.


class PeerBlock(NamedTuple):
    """A verified block that has arrived from another engine.

    Attributes:
        place: Index of the block among the requested blocks.
        data: Content for ``BlockCopier.write``. The content is valid until ``done`` is called.
        done: Function that the receiver must call once, on any thread. After the call, the buffer is reused.
    """

    place: int
    data: "bytes | memoryview"
    done: Callable[[], None]


class PeerTier(Protocol):
    """Interface for loading blocks from the source of a request: another engine that has KV blocks of the request. The
    methods do not block and do not raise errors. Blocks that cannot be loaded do not arrive.

    Only the busy loop's thread calls the methods. The callbacks ``arrived`` and ``ended`` are called on another thread,
    and must return without waiting.
    """

    def opened(self, request: Request) -> None:
        """Handle a new request. If the request has an allowed source, open a pull: a stream to the source that keeps
        the source's lease alive.
        """

    def closed(self, request: Request) -> None:
        """Release the lease of the request's source, and end the pull and its fetches. If the request has no pull, do
        nothing.
        """

    def num_blocks(self, request: Request) -> int:
        """Return the number of leading block positions for which the source is expected to have the needed blocks of
        all groups. Return 0 if there is no source, or if the source has failed. The method must take little time.
        """

    def fetch(
        self,
        request: Request,
        names: Sequence[BlockName],
        arrived: Callable[[Sequence[PeerBlock]], None],
        ended: Callable[[], None],
    ) -> int:
        """Request the blocks ``names`` from the source, in the order in which they are needed. No name may occur twice.
        Return a number that identifies the fetch.

        ``arrived`` is called with batches of blocks, in any order. ``ended`` is called once after the last batch, even
        if no block arrived.
        """

    def abandon(self, fetch_id: int) -> None:
        """Stop waiting for the blocks of a fetch that have not arrived. If ``ended`` has not been called yet, it is
        called soon. No block of the fetch arrives after this call.
        """
