"""The engine's own connector. It loads a block from host memory, or else from a disk, or else from another engine."""

import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock_common.errors import Unimplemented
from penstock_common.observability.tracing import Headers
from penstock_common.types.kv_transfer import BlockName, KvMedium
from penstock_enginecore.core.request import Request
from penstock_enginecore.kv_transfer.core.base import (
    BlockCopier,
    BlockHolder,
    Done,
    LoadEnded,
    PeerBlock,
    PeerTier,
    Place,
)
from penstock_enginecore.kv_transfer.core.host_disk_tiers import BlockStore, DiskTier, HostTier
from penstock_enginecore.kv_transfer.core.transfer_stats import LoadRates, Observe, Transfer, outcome_of
from penstock_enginecore.kv_transfer.core.validation import PARAMS_FIELD

# Loads from the sources of requests. Each block is written to the pool when it arrives.

logger = logging.getLogger(__name__)

Over = Callable[[list[Place]], None]
"""Callback when a load has ended, with the places whose content arrived completely. Called once, on any thread."""


class PeerLoads:
    """A connector's loads through a ``PeerTier``. Only the busy loop's thread may call the methods."""

    def __init__(self, peers: PeerTier, copier: BlockCopier) -> None:
        self._peers = peers
        self._copier = copier
        self._had: dict[str, set[bytes]] = {}
        """Hashes of the blocks that a request's source had, by request key."""
        self._missing: dict[str, set[BlockName]] = {}
        """Blocks that a request's source was asked for but has not sent, by request key."""
        self._asked: dict[int, tuple[set[BlockName], Sequence[Place]]] = {}
        """Set of the request's missing blocks, and the places to load, by number of the load."""

    def opened(self, request: Request) -> None:
        """Handle a new request."""
        self._peers.opened(request)

    def closed(self, request: Request) -> None:
        """Handle the end or move of a request."""
        self._had.pop(request.key, None)
        self._missing.pop(request.key, None)
        self._peers.closed(request)

    def has(self, request: Request, name: BlockName) -> bool:
        """Return whether the request's source is expected to send a block."""
        count = self._peers.num_blocks(request)
        if not count:
            return False
        had = self._had.get(request.key)
        if had is None:
            had = self._had[request.key] = set(request.block_hashes[:count])
        return name.hash in had and name not in self._missing.get(request.key, ())

    def load(self, request: Request, places: Sequence[Place], over: Over) -> int:
        """Begin to load blocks. Return the number of the load, for ``abandon``."""
        missing = self._missing.setdefault(request.key, set())
        # A block counts as missing until it arrives, so that it is not requested twice.
        missing.update(place.name for place in places)

        def all_over(arrived: list[Place]) -> None:
            missing.difference_update(place.name for place in arrived)
            over(arrived)

        load = _PeerLoad(self._copier, places, all_over)
        number = self._peers.fetch(request, [place.name for place in places], load.arrived, load.ended)
        self._asked[number] = missing, places
        return number

    def abandon(self, number: int) -> None:
        """Abandon the blocks of a load that have not arrived. The load then ends soon, and these blocks may be
        requested again.
        """
        missing, places = self._asked.pop(number, (set(), ()))
        missing.difference_update(place.name for place in places)
        self._peers.abandon(number)

    def taken(self, number: int) -> None:
        """Remove a load whose end has been processed."""
        self._asked.pop(number, None)


class _PeerLoad:
    """Load from another engine. Only one write to the pool is in flight at a time. Blocks that arrive during a write
    are written together by the next write. Thread-safe.
    """

    def __init__(self, copier: BlockCopier, places: Sequence[Place], over: Over) -> None:
        self._copier = copier
        self._places = places
        self._over = over
        self._lock = threading.Lock()
        self._waiting: list[PeerBlock] = []
        self._writing = False
        self._has_ended = False
        self._arrived: list[int] = []

    def arrived(self, blocks: Sequence[PeerBlock]) -> None:
        """Write blocks that have arrived."""
        with self._lock:
            self._waiting += blocks
            if self._writing:
                return
            self._writing = True
        self._write()

    def ended(self) -> None:
        """Record that no more blocks will arrive."""
        with self._lock:
            self._has_ended = True
            if self._writing:
                return
        self._tell()

    def _write(self) -> None:
        with self._lock:
            blocks, self._waiting = self._waiting, []
        try:
            future = self._copier.write(
                [self._places[block.place].block_id for block in blocks], [block.data for block in blocks]
            )
        except Exception as e:  # The copier raises an error immediately if it no longer works.
            self._written(blocks, e)
        else:
            future.add_done_callback(partial(self._is_written, blocks))

    def _is_written(self, blocks: Sequence[PeerBlock], done: "Future[None]") -> None:
        self._written(blocks, done.exception())

    def _written(self, blocks: Sequence[PeerBlock], error: BaseException | None) -> None:
        for block in blocks:
            block.done()
        with self._lock:
            if error is None:
                self._arrived += [block.place for block in blocks]
            more = bool(self._waiting)
            self._writing = more
            tell = self._has_ended and not more
        if error is not None:
            logger.warning("cannot store KV blocks that another engine sent: %s: %s", type(error).__name__, error)
        if more:
            self._write()
        elif tell:
            self._tell()

    def _tell(self) -> None:
        self._over([self._places[place] for place in sorted(self._arrived)])


_LAST_SECONDS = 5.0
"""Maximum time in seconds for writing blocks to the disk when the engine shuts down."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """Statistics of the tiers. Counts are since the engine started.

    Attributes:
        host_usage: Fraction of host memory slots in use, in [0, 1]. None without that tier.
        disk_usage: Fraction of disk slots in use, in [0, 1]. None without that tier.
        num_saved_blocks: Number of blocks saved to host memory.
        num_written_blocks: Number of blocks written to the disk.
        num_loaded_blocks: Number of blocks loaded from each medium.
        block_bytes: Bytes per block.
    """

    host_usage: float | None
    disk_usage: float | None
    num_saved_blocks: int
    num_written_blocks: int
    num_loaded_blocks: dict[KvMedium, int]
    block_bytes: int


@dataclass(slots=True)
class _Load:
    """A load in flight.

    Attributes:
        number: Number of the load.
        began: Start time in seconds.
        headers: Trace context of the request.
        parts: Number of operations in flight: host copies, disk reads and the load from another engine.
        at_peer: Number of the load from another engine, or 0.
        disk: Number of disk batches in flight.
        num_on_disk: Number of blocks in these batches.
        arrived: Places that have arrived, with their medium.
    """

    number: int
    began: float
    headers: Headers
    parts: int = 0
    at_peer: int = 0
    disk: int = 0
    num_on_disk: int = 0
    arrived: list[tuple[Place, KvMedium]] = field(default_factory=list)


class TieredConnector:
    """The ``KVConnector`` for host memory, disk and other engines. Call ``begin`` before the first step.

    ``wake`` is called on any thread when ``take_ended`` has events to process. ``observe`` gets every finished transfer
    from host memory or disk.
    """

    def __init__(self, wake: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.observe: Observe = lambda _: None
        self._wake = wake
        self._clock = clock
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._blocks: BlockHolder | None = None
        self._host: HostTier | None = None
        self._disk: DiskTier | None = None
        self._copier: BlockCopier | None = None
        self._peers: PeerLoads | None = None
        self._rates = LoadRates()
        self._loads: dict[int, _Load] = {}
        self._num_loaded = dict.fromkeys(KvMedium, 0)
        self._ended: list[LoadEnded] = []
        self._last = 0
        self._under_way: set[Future[Any]] = set()

    def attach(self, blocks: BlockHolder) -> None:
        self._blocks = blocks

    def begin(self, copier: BlockCopier, num_host_slots: int, store: BlockStore | None = None) -> None:
        """Start the connector. The KV cache must be allocated.

        Args:
            copier: Copies blocks.
            num_host_slots: Number of blocks that fit into the host memory tier. 0 means no host memory tier.
            store: Disk for blocks evicted from host memory, or None.
        """
        if self._blocks is None:
            raise RuntimeError("begin was called before attach")
        self._copier = copier
        if num_host_slots:
            keep = None
            if store is not None:
                self._disk = DiskTier(store, copier, self._blocks, self._follow, self._clock)
                keep = self._disk.keep
            self._host = HostTier(copier, num_host_slots, self._blocks, self._follow, keep)

    def take_from(self, peers: PeerTier) -> None:
        """Load blocks from other engines as well, from now on. Raises RuntimeError if ``begin`` was not called."""
        if self._copier is None:
            raise RuntimeError("take_from was called before begin")
        self._peers = PeerLoads(peers, self._copier)

    def check(self, params: Mapping[str, Any]) -> None:  # noqa: ARG002 - a protocol
        raise Unimplemented(
            f"{PARAMS_FIELD} is set, but kv_transfer.connector is empty; only a plugin's connector accepts this field",
            field=PARAMS_FIELD,
        )

    def answer(self, request: Request) -> Mapping[str, Any] | None:  # noqa: ARG002 - a protocol
        """See ``KVConnector``. Always None, because the source of a request's blocks is sent in a separate field."""
        return None

    def lookup(self, request: Request, names: Sequence[Sequence[BlockName]]) -> int:
        count = 0
        for of_place in names:
            if not all(self._where(request, name) for name in of_place):
                break
            count += 1
        return count

    def _where(self, request: Request, name: BlockName) -> KvMedium | None:
        if self._host is not None and name in self._host.index:
            return KvMedium.HOST
        if self._disk is not None and name in self._disk.index:
            return KvMedium.DISK
        return KvMedium.PEER if self._peers is not None and self._peers.has(request, name) else None

    def seconds(self, request: Request, names: Sequence[BlockName]) -> float:
        """See ``KVConnector``. A load from host memory counts as 0 seconds. Such a load is done when the running step
        ends. A request that computes its tokens would also have to wait for that step.
        """
        counts = Counter(self._where(request, name) for name in names)
        return sum(self._rates.seconds(medium, count) for medium, count in counts.items() if medium is not None)

    def load(self, request: Request, places: Sequence[Place]) -> int:
        self._last += 1
        load = self._loads[self._last] = _Load(self._last, self._clock(), request.context.trace_context)
        of: dict[KvMedium | None, list[Place]] = {}
        for place in places:
            of.setdefault(self._where(request, place.name), []).append(place)
        if self._host is not None and (here := of.get(KvMedium.HOST)):
            load.parts += 1
            self._follow(self._host.load(here), partial(self._loaded, load, here))
        if self._disk is not None and (there := of.get(KvMedium.DISK)):
            load.disk, load.num_on_disk = self._disk.num_batches(len(there)), len(there)
            load.parts += load.disk
            self._disk.load(there, partial(self._tell_read, load))
        if self._peers is not None and (away := of.get(KvMedium.PEER)):
            load.parts += 1
            load.at_peer = self._peers.load(request, away, partial(self._tell_fetched, load))
        if not load.parts:
            self._end(load)
        return load.number

    def abandon(self, load_id: int) -> None:
        """See ``KVConnector``. Copies in flight are completed."""
        load = self._loads.get(load_id)
        if load is not None and load.at_peer and self._peers is not None:
            self._peers.abandon(load.at_peer)

    def opened(self, request: Request) -> None:
        if self._peers is not None:
            self._peers.opened(request)

    def closed(self, request: Request) -> None:
        if self._peers is not None:
            self._peers.closed(request)

    def on_cached(self, places: Sequence[Place]) -> None:
        """See ``KVConnector``. Do nothing: blocks are saved when they lose their last reference."""

    def on_freed(self, places: Sequence[Place]) -> None:
        if self._host is not None:
            self._host.freed(places)

    def on_evicted(self, places: Sequence[Place]) -> None:
        if self._host is not None:
            self._host.taken(place.name for place in places)

    def take_ended(self) -> list[LoadEnded]:
        while not self._news.empty():
            self._news.get()()
        if self._host is not None:
            self._host.save()
        ended, self._ended = self._ended, []
        return ended

    @property
    def has_news(self) -> bool:
        return bool(self._ended) or not self._news.empty()

    @property
    def num_held_blocks(self) -> int:
        return 0 if self._host is None else self._host.num_held_blocks

    def stats(self) -> TierStats:
        """Return statistics. Thread-safe."""
        host, disk = self._host, self._disk
        return TierStats(
            host_usage=None if host is None else host.usage,
            disk_usage=None if disk is None else disk.usage,
            num_saved_blocks=0 if host is None else host.num_saved,
            num_written_blocks=0 if disk is None else disk.num_written,
            num_loaded_blocks=dict(self._num_loaded),
            block_bytes=0 if self._copier is None else self._copier.block_bytes,
        )

    def settle(self) -> None:
        if self._host is not None:
            self._host.drop_queued()
        for number in self._loads:
            self.abandon(number)
        while self._loads or self.num_held_blocks:
            for future in list(self._under_way):
                future.exception()
            self._news.get()()

    def reset(self) -> None:
        if self._host is not None:
            self._host.clear()
        if self._disk is not None:
            self._disk.clear()

    def shutdown(self) -> None:
        """See ``KVConnector``. Blocks that are only in host memory are written to the disk, within a time limit."""
        disk, self._disk = self._disk, None
        if disk is None:
            return
        if self._host is not None:
            self._keep_all(disk, self._host, time.monotonic() + _LAST_SECONDS)
        disk.close()

    def _keep_all(self, disk: DiskTier, host: HostTier, deadline: float) -> None:
        """Write the blocks of the host tier to the disk, most recently used first."""
        names = host.index.names
        while (names or disk.busy) and time.monotonic() < deadline:
            while names and disk.has_room:
                name = names.pop()
                slot = host.index.get(name)
                if slot is not None:
                    disk.keep([name], [slot])
            if disk.busy:
                with contextlib.suppress(queue.Empty):
                    self._news.get(timeout=0.1)()

    def _follow(self, future: "Future[Any]", then: Done) -> None:
        def over(done: "Future[Any]") -> None:
            """Queue the end of the copy. Thread-safe."""
            self._news.put(partial(self._over, done, then))
            self._wake()

        self._under_way.add(future)
        future.add_done_callback(over)

    def _over(self, future: "Future[Any]", then: Done) -> None:
        self._under_way.discard(future)
        then(future)

    def _loaded(self, load: _Load, places: list[Place], done: "Future[None]") -> None:
        error = done.exception()
        if error is None:
            load.arrived += [(place, KvMedium.HOST) for place in places]
        elif self._host is not None:
            self._host.fail(error)
        self._tell_of(load, KvMedium.HOST, len(places))
        self._part_over(load)

    def _tell_read(self, load: _Load, places: list[Place], arrived: list[Place], seconds: float) -> None:
        """Queue the end of a disk batch. Thread-safe."""
        self._news.put(partial(self._read, load, places, arrived, seconds))
        self._wake()

    def _read(self, load: _Load, places: list[Place], arrived: list[Place], seconds: float) -> None:
        load.arrived += [(place, KvMedium.DISK) for place in arrived]
        self._rates.loaded(KvMedium.DISK, len(arrived), seconds)
        if self._disk is not None and len(arrived) < len(places):
            self._disk.dropped([place for place in places if place not in arrived])
        load.disk -= 1
        if not load.disk:
            self._tell_of(load, KvMedium.DISK, load.num_on_disk)
        self._part_over(load)

    def _tell_fetched(self, load: _Load, places: list[Place]) -> None:
        """Queue the end of a load from a peer. Thread-safe."""
        self._news.put(partial(self._fetched, load, places))
        self._wake()

    def _fetched(self, load: _Load, places: list[Place]) -> None:
        load.arrived += [(place, KvMedium.PEER) for place in places]
        self._rates.loaded(KvMedium.PEER, len(places), self._clock() - load.began)
        if self._peers is not None:
            self._peers.taken(load.at_peer)
        self._part_over(load)

    def _tell_of(self, load: _Load, medium: KvMedium, wanted: int) -> None:
        """Report a finished transfer from host memory or disk."""
        count = sum(found is medium for _, found in load.arrived)
        size = 0 if self._copier is None else count * self._copier.block_bytes
        outcome = outcome_of(wanted, count)
        self.observe(Transfer(load.headers, medium, "", load.began, self._clock(), wanted, count, size, outcome))

    def _part_over(self, load: _Load) -> None:
        load.parts -= 1
        if not load.parts:
            self._end(load)

    def _end(self, load: _Load) -> None:
        del self._loads[load.number]
        for _, medium in load.arrived:
            self._num_loaded[medium] += 1
        self._ended.append(LoadEnded(load.number, tuple(load.arrived)))
