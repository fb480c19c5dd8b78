"""The loading engine: the scheduler's real ``KvLoads`` and ``Loads``, block pool and block tables.

Requests and their queues are minimal. The choice of the next scheduled request is an event. The connector behaves like
``TieredConnector`` for blocks of other engines: a load ends when no more blocks will arrive and no block is being
written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

from penstock_common.types.kv_transfer import BlockName, KvMedium
from penstock_enginecore.core.kv_cache.block_pool import BlockLog, BlockPool, FreeBlockQueue, KVCacheBlock
from penstock_enginecore.core.kv_cache.manager import KVCacheManager
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup
from penstock_enginecore.core.request import Hold
from penstock_enginecore.kv_transfer.core.base import LoadEnded, Place
from penstock_enginecore.kv_transfer.core.kv_loads import KvLoads, Loads
from tests.modelcheck.violation import Violation

BLOCK = 2
"""Tokens per block. A prompt is one token longer than its blocks."""


class Wanting:
    """A minimal request. ``has_source`` says whether another engine may have the request's blocks."""

    skip_reading_prefix_cache = False
    whole_spans = ()
    num_preemptions = 1

    def __init__(self, number: int, letters: str) -> None:
        self.number = number
        self.key = str(number)
        self.block_hashes = [letter.encode() * 16 for letter in letters]
        self.num_tokens = BLOCK * len(letters) + 1
        self.num_processed_tokens = 0
        self.num_cached_tokens = -1
        self.loaded_tokens: tuple[int, ...] = ()
        self.all_token_ids: tuple[int, ...] = ()
        self.hold = Hold.NONE
        self.has_source = True
        self.missing: frozenset[BlockName] = frozenset()
        """Blocks that were requested but not received."""

    @property
    def num_loaded_tokens(self) -> int:
        """See ``Request``."""
        return sum(self.loaded_tokens)


class Line:
    """The waiting requests, without an order, because each request may be the next one."""

    def hold(self, request: Wanting, hold: Hold) -> None:
        """See ``WaitingRequests``."""
        request.hold |= hold

    def release(self, request: Wanting, hold: Hold) -> None:
        """See ``WaitingRequests``."""
        request.hold &= ~hold


@dataclass
class Bringing:
    """A load. ``writing`` lists the destinations of received blocks with their sequences, in order of arrival."""

    request: int
    places: tuple[Place, ...]
    writing: list[tuple[Place, int]] = field(default_factory=list)
    arrived: tuple[Place, ...] = ()
    ended: bool = False

    @property
    def over(self) -> bool:
        """Return whether the load has ended and its writes are complete."""
        return self.ended and not self.writing


class Destination:
    """The loading engine.

    Args:
        room: Number of its blocks.

    The caller sets ``fetch`` and ``abandon_fetch``, which call a request's pull with the number of a load, and block
    names.
    """

    num_held_blocks = 0

    def __init__(self, room: int, kv_loads: type[KvLoads], loads: type[Loads]) -> None:
        groups = (KVCacheGroup(layer_names=("layer",)),)
        config = KVCacheConfig(num_blocks=room + 1, block_size=BLOCK, groups=groups, max_model_len=64)
        self.kv_cache = KVCacheManager(config, enable_prefix_caching=True)
        self.requests: dict[int, Wanting] = {}
        self.running: list[Wanting] = []
        self.memory: dict[int, str] = {}
        self.bringing: dict[int, Bringing] = {}
        self.fetch: Callable[[int, int, list[BlockName]], None]
        self.abandon_fetch: Callable[[int, int], None]
        state: Any = SimpleNamespace(
            kv_cache=self.kv_cache,
            waiting=Line(),
            running=self.running,
            clock=SimpleNamespace,
            by_priority=False,
            leases=None,
            context=SimpleNamespace(min_load_tokens=1),
        )
        self.kv_loads = kv_loads(state, self)  # type: ignore[arg-type]
        self.kv_loads._loads = loads()

    @property
    def pool(self) -> BlockPool:
        """The engine's block pool."""
        return self.kv_cache.pool

    # Events.

    def arrive(self, number: int, letters: str) -> None:
        """Add a request."""
        request = self.requests[number] = Wanting(number, letters)
        self.kv_loads.added(request)  # type: ignore[arg-type]

    def turn(self, number: int) -> None:
        """Schedule a waiting request. The request is held, or starts, or does not get enough blocks."""
        request: Any = self.requests[number]
        computed = self.kv_cache.get_computed_blocks(request)
        if self.kv_loads.load(request, computed, lambda _: 0) is None:
            self._start(request)

    def start_loaded(self, number: int) -> None:
        """Start a request whose load has ended, as the scheduler does."""
        request: Any = self.requests[number]
        while not self._start(request):
            if self.running or not self.kv_loads.give_up_one(keep=request):
                return

    def _start(self, request: Any) -> bool:
        computed = self.kv_cache.get_computed_blocks(request)
        if not self.kv_cache.admit(request, computed, request.num_tokens - computed.num_tokens, reserve=0):
            return False
        self.kv_loads.started(request, computed.num_tokens, 0)
        request.hold, request.num_cached_tokens = Hold.NONE, computed.num_tokens
        self.running.append(request)
        (table,) = self.kv_cache._blocks[request.key]
        for index in range(computed.num_blocks, len(table)):
            self.memory[table[index].block_id] = chr((request.block_hashes[index:] or [b"!"])[0][0])
        return True

    def finish(self, number: int) -> None:
        """Finish a running request, whose tokens are all computed."""
        request: Any = self.requests[number]
        request.num_processed_tokens = request.num_tokens
        self.kv_cache.cache_blocks(request)
        self.end(number)

    def end(self, number: int) -> None:
        """End a request in any state."""
        request: Any = self.requests.pop(number)
        self.kv_loads.ended(request)
        if request in self.running:
            self.running.remove(request)
        self.kv_cache.free(request)

    def arrived(self, number: int, index: int, sequence: int) -> None:
        """Receive a block of a load."""
        load = self.bringing.get(number)
        if load is None or load.ended:
            raise Violation("4 a block arrived behind the end of its fetch")
        place = load.places[index]
        if place in load.arrived or place in [each for each, _ in load.writing]:
            raise Violation("5 a block came twice")
        load.writing.append((place, sequence))

    def written(self, number: int) -> int:
        """Complete the write of the first received block of a load. Returns the block's sequence."""
        load = self.bringing[number]
        place, sequence = load.writing.pop(0)
        block = self.pool.blocks[place.block_id]
        if not block.ref_count:
            raise Violation("3 a block that is written to has no reference")
        if block.block_hash is not None:
            raise Violation("2 a block is written to that is findable")
        self.memory[place.block_id] = chr(place.name.hash[0])
        load.arrived += (place,)
        return sequence

    def ended(self, number: int) -> None:
        """End a load; no more blocks come."""
        load = self.bringing.get(number)
        if load is None or load.ended:
            raise Violation("4 a fetch ended twice")
        load.ended = True

    # Interface of a connector.

    def attach(self, _: object) -> None:
        """Do nothing; the owners of the blocks are known."""

    def opened(self, _: object) -> None:
        """Do nothing; the start of a pull is an event of its own."""

    def closed(self, request: Wanting) -> None:
        """Do nothing; the end of a pull is an event of its own."""

    def lookup(self, request: Wanting, names: Sequence[Sequence[BlockName]]) -> int:
        """See ``KVConnector``."""
        count = 0
        while request.has_source and count < len(names) and not request.missing.intersection(names[count]):
            count += 1
        return count

    def seconds(self, *_: object) -> float:
        """Return 0, so that a load always pays."""
        return 0.0

    def load(self, request: Wanting, places: Sequence[Place]) -> int:
        """See ``KVConnector``."""
        number = 10 * request.number
        while number in self.bringing:
            number += 1
        self.bringing[number] = Bringing(request.number, tuple(places))
        names = [place.name for place in places]
        request.missing |= frozenset(names)
        self.fetch(request.number, number, names)
        return number

    def abandon(self, number: int) -> None:
        """See ``KVConnector``."""
        load = self.bringing[number]
        if (request := self.requests.get(load.request)) is not None:
            request.missing -= frozenset(place.name for place in load.places)
        self.abandon_fetch(load.request, number)

    @property
    def has_news(self) -> bool:
        """See ``KVConnector``."""
        return any(load.over for load in self.bringing.values())

    def take_ended(self) -> list[LoadEnded]:
        """See ``KVConnector``."""
        over = {number: load for number, load in self.bringing.items() if load.over}
        for number, load in over.items():
            del self.bringing[number]
            if (request := self.requests.get(load.request)) is not None:
                request.missing -= frozenset(place.name for place in load.arrived)
        return [
            LoadEnded(number, tuple((place, KvMedium.PEER) for place in load.arrived)) for number, load in over.items()
        ]

    # Invariants.

    def check(self) -> None:
        """Check the invariants of every state. Raises Violation."""
        held: dict[int, int] = {}
        under_way = [place for load in self.bringing.values() for place in load.places]
        ids = [place.block_id for place in under_way]
        ids += [block.block_id for tables in self.kv_cache._blocks.values() for table in tables for block in table]
        for block_id in ids:
            held[block_id] = held.get(block_id, 0) + 1
        for block in self.pool.blocks[1:]:
            if block.ref_count != held.get(block.block_id, 0):
                raise Violation("4 references of the engine that loads leak, or are given back twice", repr(block))
            if block.block_hash is not None and self.memory[block.block_id] != chr(block.block_hash[0]):
                raise Violation("2 a block is findable that has another content")
        if len({place.name for place in under_way}) != len(under_way):
            raise Violation("5 a block is on its way twice at a time")

    def check_rest(self) -> None:
        """Check the invariants of states at rest. Raises Violation."""
        loads = self.kv_loads
        if self.requests:
            raise Violation("4 a request never goes on")
        if self.pool.num_free_blocks != self.pool.num_usable_blocks:
            raise Violation("4 blocks are never given back")
        if len(loads._loads) or loads._for or loads._others or loads._held or loads._ready:
            raise Violation("4 something is left of a load")

    def key(self) -> tuple[Any, ...]:
        """Return a key of the state. Keys are equal for states that differ only in the choice of pool blocks."""
        tables = self.kv_cache._blocks
        loads = self.kv_loads
        return (
            tuple(
                (
                    number,
                    request.hold.value,
                    request.has_source,
                    request.missing,
                    request in self.running,
                    tuple(block.block_hash for block in tables[request.key][0]) if request.key in tables else None,
                )
                for number, request in sorted(self.requests.items())
            ),
            tuple(
                (
                    number,
                    tuple(place.name for place in load.places),
                    tuple((place.name, sequence) for place, sequence in load.writing),
                    load.ended,
                    tuple(place.name for place in load.arrived),
                )
                for number, load in self.bringing.items()
            ),
            tuple(block.block_hash for block in _free(self.pool)),
            tuple((block.block_hash, block.ref_count) for block in self.pool._by_hash[0].values() if block.ref_count),
            tuple(loads._held),
            tuple(loads._ready),
            tuple((load.number, load.owner, tuple(load.waiting)) for load in loads._loads._loads.values()),
        )


T = TypeVar("T")


def same(value: T) -> T:
    """Return a shallow copy."""
    kind = type(value)
    other = kind.__new__(kind)
    if hasattr(value, "__dict__"):
        other.__dict__.update(value.__dict__)
    for name in getattr(kind, "__slots__", ()):
        setattr(other, name, getattr(value, name))
    return other


def _block_of(block: KVCacheBlock) -> KVCacheBlock:
    other = KVCacheBlock(block.block_id)
    other.ref_count, other.block_hash, other.group = block.ref_count, block.block_hash, block.group
    return other


def _free(pool: BlockPool) -> list[KVCacheBlock]:
    """Return the free blocks in their order of reuse."""
    free, end = [], pool._free._tail
    block = pool._free._head.next
    while block is not None and block is not end:
        free.append(block)
        block = block.next
    return free


def pool_of(pool: BlockPool) -> BlockPool:
    """Return a copy with its own blocks."""
    other = same(pool)
    other.blocks = blocks = [_block_of(block) for block in pool.blocks]
    other.null_block = blocks[0]
    other._free = FreeBlockQueue(blocks[block.block_id] for block in _free(pool))
    other._by_hash = [{name: blocks[block.block_id] for name, block in by_hash.items()} for by_hash in pool._by_hash]
    return other


def _loads_of(loads: Loads) -> Loads:
    other = same(loads)
    other._loads = {number: same(load) for number, load in loads._loads.items()}
    for load in other._loads.values():
        load.waiting = load.waiting.copy()
    other._bringing, other._of_owner = loads._bringing.copy(), loads._of_owner.copy()
    other._of_waiting = loads._of_waiting.copy()
    return other


def destination_of(engine: Destination) -> Destination:
    """Return a copy of the engine in the same state, except for ``fetch`` and ``abandon_fetch``."""
    after = same(engine)
    after.kv_cache = kv_cache = same(engine.kv_cache)
    kv_cache.pool = pool = pool_of(engine.pool)
    pool.log = BlockLog()  # No code reads this log.
    kv_cache._blocks = {
        key: tuple([[pool.blocks[block.block_id] for block in table] for table in tables])
        for key, tables in engine.kv_cache._blocks.items()
    }
    kv_cache._num_cached = engine.kv_cache._num_cached.copy()
    known: dict[int, Any] = {}

    def request_of(request: Any) -> Any:
        if id(request) not in known:
            known[id(request)] = same(request)
        return known[id(request)]

    after.requests = {number: request_of(request) for number, request in engine.requests.items()}
    after.running = [request_of(request) for request in engine.running]
    after.memory = engine.memory.copy()
    after.bringing = {number: same(load) for number, load in engine.bringing.items()}
    for load in after.bringing.values():
        load.writing = load.writing.copy()
    before = engine.kv_loads
    after.kv_loads = loads = same(before)
    loads._connector, loads._kv_cache, loads._pool, loads._log = after, kv_cache, pool, pool.log  # type: ignore[assignment]
    loads._running = after.running  # type: ignore[assignment]
    loads._loads = _loads_of(before._loads)
    loads._for = {number: (request_of(request), count) for number, (request, count) in before._for.items()}
    for name in ("_others", "_held", "_ready"):
        setattr(loads, name, {key: request_of(request) for key, request in getattr(before, name).items()})
    return after
