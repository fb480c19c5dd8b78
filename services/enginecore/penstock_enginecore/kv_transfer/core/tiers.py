"""The connector that engines have: blocks come from host memory, then from a disk, then from other engines."""

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

# Blocks that come from the sources of requests, and are written into the pool as they come.

logger = logging.getLogger(__name__)

Over = Callable[[list[Place]], None]
"""Called once on any thread, with what has arrived whole: nobody writes to the blocks of the load any more."""


class PeerLoads:
    """What a connector has of a ``PeerTier``. Methods belong to the thread of the busy loop."""

    def __init__(self, peers: PeerTier, copier: BlockCopier) -> None:
        self._peers = peers
        self._copier = copier
        self._had: dict[str, set[bytes]] = {}
        """By key of a request, hashes of what its source had."""
        self._missing: dict[str, set[BlockName]] = {}
        """What its source was asked for, and did not bring."""
        self._asked: dict[int, tuple[set[BlockName], Sequence[Place]]] = {}
        """By load, where that is noted, and what it is to bring."""

    def opened(self, request: Request) -> None:
        """A request has come."""
        self._peers.opened(request)

    def closed(self, request: Request) -> None:
        """It has ended or gone on."""
        self._had.pop(request.key, None)
        self._missing.pop(request.key, None)
        self._peers.closed(request)

    def has(self, request: Request, name: BlockName) -> bool:
        """Whether its source is expected to bring a block."""
        count = self._peers.num_blocks(request)
        if not count:
            return False
        had = self._had.get(request.key)
        if had is None:
            had = self._had[request.key] = set(request.block_hashes[:count])
        return name.hash in had and name not in self._missing.get(request.key, ())

    def load(self, request: Request, places: Sequence[Place], over: Over) -> int:
        """Begin to bring blocks. Returns the number of the load, for ``abandon``."""
        missing = self._missing.setdefault(request.key, set())
        missing.update(place.name for place in places)  # what comes is in the pool

        def all_over(arrived: list[Place]) -> None:
            missing.difference_update(place.name for place in arrived)
            over(arrived)

        load = _PeerLoad(self._copier, places, all_over)
        number = self._peers.fetch(request, [place.name for place in places], load.arrived, load.ended)
        self._asked[number] = missing, places
        return number

    def abandon(self, number: int) -> None:
        """Nobody wants the rest of a load: it is over soon. It may be asked for again."""
        missing, places = self._asked.pop(number, (set(), ()))
        missing.difference_update(place.name for place in places)
        self._peers.abandon(number)

    def taken(self, number: int) -> None:
        """That a load is over has been taken note of."""
        self._asked.pop(number, None)


class _PeerLoad:
    """One write is under way at a time; what comes meanwhile is written together behind it. Any thread."""

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
        """Blocks have come."""
        with self._lock:
            self._waiting += blocks
            if self._writing:
                return
            self._writing = True
        self._write()

    def ended(self) -> None:
        """No more will."""
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
        except Exception as e:  # of a copier that cannot be told anything
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
            logger.warning("blocks of another engine cannot be written: %s: %s", type(error).__name__, error)
        if more:
            self._write()
        elif tell:
            self._tell()

    def _tell(self) -> None:
        self._over([self._places[place] for place in sorted(self._arrived)])


_LAST_SECONDS = 5.0
"""For what goes to the disk when the engine ends."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """``host_usage`` and ``disk_usage``: fractions of their slots that hold something, in [0, 1]; None without that tier. Since
    the start: blocks that were saved to the host, written to the disk, and loaded from each medium, of ``block_bytes`` each.
    """

    host_usage: float | None
    disk_usage: float | None
    num_saved_blocks: int
    num_written_blocks: int
    num_loaded_blocks: dict[KvMedium, int]
    block_bytes: int


@dataclass(slots=True)
class _Load:
    """``parts``: what is under way of it. ``at_peer``: the number of what is brought from another engine; 0: nothing is.
    ``headers``: trace context of the request. ``disk``: batches that are being read, of ``num_on_disk`` blocks.
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
    """A ``KVConnector``. ``begin`` comes before the first step. ``wake`` is called on any thread when ``take_ended`` has
    something to do. ``observe`` is told of what came from the engine's own media.
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
        """The KV cache is there. ``num_host_slots``: blocks that host memory takes; 0: none is kept there. ``store``: takes those
        that leave it; None: nothing does.
        """
        if self._blocks is None:
            raise RuntimeError("attach must come before begin")
        self._copier = copier
        if num_host_slots:
            keep = None
            if store is not None:
                self._disk = DiskTier(store, copier, self._blocks, self._follow, self._clock)
                keep = self._disk.keep
            self._host = HostTier(copier, num_host_slots, self._blocks, self._follow, keep)

    def take_from(self, peers: PeerTier) -> None:
        """Have blocks brought by other engines as well, from now on. Raises RuntimeError before ``begin``."""
        if self._copier is None:
            raise RuntimeError("begin must come before take_from")
        self._peers = PeerLoads(peers, self._copier)

    def check(self, params: Mapping[str, Any]) -> None:  # noqa: ARG002 - a protocol
        raise Unimplemented(
            f"{PARAMS_FIELD} is set; it is for the connector of a plugin, and kv_transfer.connector names none",
            field=PARAMS_FIELD,
        )

    def answer(self, request: Request) -> Mapping[str, Any] | None:  # noqa: ARG002 - a protocol
        """See ``KVConnector``. Who keeps its blocks is a source, not parameters."""
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
        """See ``KVConnector``. The host's memory takes no time beside computing, but that of a step which runs, which computing
        waits for as well.
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
        """See ``KVConnector``. What is being copied is copied."""
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
        """See ``KVConnector``. Blocks are saved when nobody has them any more."""

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
        """What there is, and what came. Any thread."""
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
        """See ``KVConnector``. What only host memory has goes to the disk, as much as a few seconds are enough for."""
        disk, self._disk = self._disk, None
        if disk is None:
            return
        if self._host is not None:
            self._keep_all(disk, self._host, time.monotonic() + _LAST_SECONDS)
        disk.close()

    def _keep_all(self, disk: DiskTier, host: HostTier, deadline: float) -> None:
        """Those used last first."""
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
            """Any thread."""
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
        """Any thread."""
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
        """Any thread."""
        self._news.put(partial(self._fetched, load, places))
        self._wake()

    def _fetched(self, load: _Load, places: list[Place]) -> None:
        load.arrived += [(place, KvMedium.PEER) for place in places]
        self._rates.loaded(KvMedium.PEER, len(places), self._clock() - load.began)
        if self._peers is not None:
            self._peers.taken(load.at_peer)
        self._part_over(load)

    def _tell_of(self, load: _Load, medium: KvMedium, wanted: int) -> None:
        """What was to come from a medium of the engine's own has come, as far as it does."""
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
