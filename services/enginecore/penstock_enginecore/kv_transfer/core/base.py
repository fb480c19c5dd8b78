"""Interfaces of KV transfer: connectors, which bring blocks into the pool and note those that leave it, copiers and peers."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from penstock_common.types.kv_transfer import BlockName, KvMedium
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig
from penstock_enginecore.core.request import Request

# Copies of whole blocks between the pool of the workers and other memory.

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


class Place(NamedTuple):
    """A block of the pool and the content that it has, or is to get."""

    name: BlockName
    block_id: int


class LoadEnded(NamedTuple):
    """A load that is over: nobody writes to its blocks any more. ``arrived``: the places whose content came whole and was
    checked, in the order of the load; others hold nothing.
    """

    load_id: int
    arrived: tuple[tuple[Place, KvMedium], ...]


class BlockHolder(Protocol):
    """The pool, as a connector sees it: called on the thread of the busy loop."""

    @property
    def num_spare(self) -> int:
        """Blocks that may be held beside those that are: requests have no need of them now."""

    def hold(self, place: Place) -> bool:
        """Keep a block that has this content and that no request has, until ``release``. False: it has other content by now, or a
        request has it.
        """

    def release(self, place: Place) -> None:
        """Give it back."""

    def findable(self, medium: KvMedium, name: BlockName, is_there: bool) -> None:
        """A block that the connector keeps by itself can be found from now on, or no more: routers are told, who send prompts to
        where they need not be computed.
        """


class KVConnector(Protocol):
    """Brings what is not in the pool. Nothing waits in it, and it raises nothing: what it cannot bring is computed.

    All calls but ``check`` come from the thread of the busy loop. ``wake`` of whoever made it is called from any thread when a
    load has ended.
    """

    def attach(self, blocks: BlockHolder) -> None:
        """Whose blocks they are; once, before everything else."""

    def check(self, params: Mapping[str, Any]) -> None:
        """Any thread: look at ``kv_transfer_params`` before their request is queued. Raises InvalidArgument, or Unimplemented
        where it takes none.
        """

    def answer(self, request: Request) -> Mapping[str, Any] | None:
        """What is to be told of a request that has ended as it should, and has its blocks still: it becomes the
        ``kv_transfer_params`` of the answer. None: nothing.
        """

    def lookup(self, request: Request, names: Sequence[Sequence[BlockName]]) -> int:
        """How many blocks in a row somebody has. ``names``: for each place of a block, those of all groups that are needed there.
        Free of side effects, and asked often.
        """

    def seconds(self, request: Request, names: Sequence[BlockName]) -> float:
        """How long it is likely to take to bring these, by what was measured; 0 while nothing was."""

    def load(self, request: Request, places: Sequence[Place]) -> int:
        """Begin to bring these. The blocks are written to until ``take_ended`` has said that the load is over. Returns its
        number.
        """

    def abandon(self, load_id: int) -> None:
        """Nobody wants a load any more. It ends when copies that are on their way have."""

    def opened(self, request: Request) -> None:
        """A request has come, and may have a source: keep its lease, so that it is there when the request has its turn."""

    def closed(self, request: Request) -> None:
        """A request has ended or gone on: its source is not needed any more."""

    def on_cached(self, places: Sequence[Place]) -> None:
        """Blocks have become findable in the pool."""

    def on_freed(self, places: Sequence[Place]) -> None:
        """Findable blocks have lost their last reference: they may be taken for something else at any time from now on, unless
        the pool is asked to keep them.
        """

    def on_evicted(self, places: Sequence[Place]) -> None:
        """Blocks have been taken for something else."""

    def take_ended(self) -> list[LoadEnded]:
        """Loads that have ended since the last call, each once. Called in every step: copies that are over give their blocks
        back here, and others begin.
        """

    @property
    def has_news(self) -> bool:
        """Whether ``take_ended`` has something to do. Cheap."""

    @property
    def num_held_blocks(self) -> int:
        """Blocks of the pool that it holds now."""

    def settle(self) -> None:
        """Wait until no copy is under way, and none begins: all loads have ended then, and ``take_ended`` tells of them."""

    def reset(self) -> None:
        """Forget everything that is kept, as the pool has: weights or adapters are others now."""

    def shutdown(self) -> None:
        """End what runs beside the engine. Idempotent."""


class PluggedConnector(KVConnector, Protocol):
    """One that a plugin adds, in place of the engine's own. ``lookup`` and ``load`` find the request's parameters in
    ``request.kv_transfer_params``.
    """

    def begin(self, copier: BlockCopier, kv_cache: KVCacheConfig) -> None:
        """The KV cache is there, and no step was: blocks are read and written by ``copier``. Raises ConfigError."""


# What brings blocks from other engines, as the connector sees it.


class PeerBlock(NamedTuple):
    """A block that has come, and was checked. ``place``: among those that were asked for. ``data``: its bytes as
    ``BlockCopier.write`` takes them. They stay as they are until ``done`` was called, once, from any thread; only then more may
    come in their place.
    """

    place: int
    data: "bytes | memoryview"
    done: Callable[[], None]


class PeerTier(Protocol):
    """The sources of requests. Nothing waits in it, and it raises nothing: what it cannot bring does not come.

    All calls come from the thread of the busy loop. ``arrived`` and ``ended`` are called on another one, and return at once.
    """

    def opened(self, request: Request) -> None:
        """A request has come: if it has a source that may be asked, open a pull, which keeps the lease."""

    def closed(self, request: Request) -> None:
        """Its source is not needed any more: give the lease up, and end the pull and what it fetches. Nothing happens without a
        pull.
        """

    def num_blocks(self, request: Request) -> int:
        """Blocks from the first one on that its source is expected to have, in all groups that are needed behind them: 0 without
        a source, and once it has failed. Cheap.
        """

    def fetch(
        self,
        request: Request,
        names: Sequence[BlockName],
        arrived: Callable[[Sequence[PeerBlock]], None],
        ended: Callable[[], None],
    ) -> int:
        """Ask for blocks, each once, in the order in which they are wanted. Those that come are told in any order and any number
        at a time, then ``ended`` once, also where none has come. Returns the number of the fetch.
        """

    def abandon(self, fetch_id: int) -> None:
        """Nobody wants the rest of it: ``ended`` is called soon, if it was not yet, and nothing arrives behind that."""
