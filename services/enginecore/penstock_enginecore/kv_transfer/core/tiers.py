"""The engine's own KV connector. The connector loads a block from host memory, or else from a disk, or else from
another engine.
"""

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
from penstock_common.types.kv_transfer import STATE_GROUP, BlockName, KvMedium
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
from penstock_enginecore.kv_transfer.core.host_disk_tiers import DiskTier, HostTier
from penstock_enginecore.kv_transfer.core.size_class import SizeClass, TierPlan, TierStats
from penstock_enginecore.kv_transfer.core.transfer_stats import Observe, Transfer, outcome_of
from penstock_enginecore.kv_transfer.core.validation import PARAMS_FIELD

# Loads from the source of a request, which is another engine. Each block is written to the pool when it arrives.

logger = logging.getLogger(__name__)

Over = Callable[[list[Place]], None]
"""Callback for the end of a load. The argument has the places whose content arrived completely. The callback is called
once, on any thread.
"""


class PeerLoads:
    """The loads of a connector that come from other engines, through a ``PeerTier``. Only the busy loop's thread may
    call the methods. ``states`` is the copier of states of recurrent layers, or None for a model without recurrent
    layers.
    """

    def __init__(self, peers: PeerTier, copier: BlockCopier, states: BlockCopier | None = None) -> None:
        self._peers = peers
        self._copier = copier
        self._states = states
        self._had: dict[str, set[bytes]] = {}
        """Hashes of the blocks that the request's source has announced, by request key."""
        self._missing: dict[str, set[BlockName]] = {}
        """Names of the blocks that were requested from the request's source but have not arrived, by request key."""
        self._asked: dict[int, tuple[set[BlockName], Sequence[Place]]] = {}
        """Set of the request in ``_missing``, and the places to load, by number of the load."""

    def opened(self, request: Request) -> None:
        """Handle a new request."""
        self._peers.opened(request)

    def closed(self, request: Request) -> None:
        """Handle the end of a request, or its move to another engine."""
        self._had.pop(request.key, None)
        self._missing.pop(request.key, None)
        self._peers.closed(request)

    def has(self, request: Request, name: BlockName) -> bool:
        """Return whether the request's source is expected to send a block or state. The source has only the state at
        the end of its last block.
        """
        count = self._peers.num_blocks(request)
        if not count:
            return False
        if name.group == STATE_GROUP:
            hashes = request.block_hashes
            is_last = count <= len(hashes) and name.hash == hashes[count - 1]
            return is_last and name not in self._missing.get(request.key, ())
        had = self._had.get(request.key)
        if had is None:
            had = self._had[request.key] = set(request.block_hashes[:count])
        return name.hash in had and name not in self._missing.get(request.key, ())

    def load(self, request: Request, places: Sequence[Place], over: Over) -> int:
        """Begin to load blocks from the request's source. Return the number of the load, for ``abandon``."""
        missing = self._missing.setdefault(request.key, set())
        # A requested block counts as missing until it arrives, so that no other load requests it.
        missing.update(place.name for place in places)

        def all_over(arrived: list[Place]) -> None:
            missing.difference_update(place.name for place in arrived)
            over(arrived)

        load = _PeerLoad(self._copier, places, all_over, self._states)
        number = self._peers.fetch(request, [place.name for place in places], load.arrived, load.ended)
        self._asked[number] = missing, places
        return number

    def abandon(self, number: int) -> None:
        """Stop waiting for the blocks of a load that have not arrived. The load then ends soon, and these blocks may be
        requested again.
        """
        missing, places = self._asked.pop(number, (set(), ()))
        missing.difference_update(place.name for place in places)
        self._peers.abandon(number)

    def taken(self, number: int) -> None:
        """Forget a load whose end has been processed."""
        self._asked.pop(number, None)


class _PeerLoad:
    """One load from another engine. Only one write to the pool is in flight at a time. Blocks that arrive during a
    write are written together by the next write. One write contains either only blocks or only states. Thread-safe.
    """

    def __init__(
        self, copier: BlockCopier, places: Sequence[Place], over: Over, states: BlockCopier | None = None
    ) -> None:
        self._copier = copier
        self._states = states
        self._places = places
        self._over = over
        self._lock = threading.Lock()
        self._waiting: list[PeerBlock] = []
        self._writing = False
        self._has_ended = False
        self._arrived: list[int] = []

    def arrived(self, blocks: Sequence[PeerBlock]) -> None:
        """Write blocks that have arrived from the other engine to the pool."""
        with self._lock:
            self._waiting += blocks
            if self._writing:
                return
            self._writing = True
        self._write()

    def ended(self) -> None:
        """Record that no more blocks of the load will arrive."""
        with self._lock:
            self._has_ended = True
            if self._writing:
                return
        self._tell()

    def _write(self) -> None:
        with self._lock:
            of_states = self._is_state(self._waiting[0])
            blocks = [block for block in self._waiting if self._is_state(block) is of_states]
            self._waiting = [block for block in self._waiting if self._is_state(block) is not of_states]
        copier = self._copier if self._states is None or not of_states else self._states
        try:
            future = copier.write(
                [self._places[block.place].block_id for block in blocks], [block.data for block in blocks]
            )
        except Exception as e:  # A copier that no longer works raises an error immediately.
            self._written(blocks, e)
        else:
            future.add_done_callback(partial(self._is_written, blocks))

    def _is_state(self, block: PeerBlock) -> bool:
        return self._places[block.place].name.group == STATE_GROUP

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
            logger.warning(
                "KV blocks that another engine sent cannot be copied to the KV cache, so this engine recomputes them: %s: %s",
                type(error).__name__,
                error,
            )
        if more:
            self._write()
        elif tell:
            self._tell()

    def _tell(self) -> None:
        self._over([self._places[place] for place in sorted(self._arrived)])


_LAST_SECONDS = 5.0
"""Maximum time in seconds for writing blocks to the disk when the engine shuts down."""


@dataclass(slots=True)
class _Load:
    """A load in flight.

    Attributes:
        number: Number of the load.
        began: Start time in seconds.
        headers: Trace context of the request, as headers.
        parts: Number of operations of the load that are in flight: copies from host memory, disk reads and the load
            from another engine.
        at_peer: Number that identifies the load from another engine, or 0 without such a load.
        parts_of: Number of operations in flight on each medium, only for host memory and the disk.
        num_wanted: Number of blocks and states to load from each medium, only for host memory and the disk.
        arrived: Places whose content has arrived, and the medium from which it came.
    """

    number: int
    began: float
    headers: Headers
    parts: int = 0
    at_peer: int = 0
    parts_of: Counter[KvMedium] = field(default_factory=Counter)
    num_wanted: Counter[KvMedium] = field(default_factory=Counter)
    arrived: list[tuple[Place, KvMedium]] = field(default_factory=list)

    def begin(self, medium: KvMedium, num_parts: int, num_wanted: int) -> None:
        """Add operations on host memory or the disk to the load."""
        self.parts += num_parts
        self.parts_of[medium] += num_parts
        self.num_wanted[medium] += num_wanted


class TieredConnector:
    """The ``KVConnector`` for host memory, disk and other engines. The engine must call ``begin`` before the first
    step.

    KV blocks and states of recurrent layers have separate tiers, because their sizes differ. ``wake`` is called on any
    thread when ``take_ended`` has events to process. ``observe`` gets every finished transfer from host memory or disk.
    """

    def __init__(self, wake: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.observe: Observe = lambda _: None
        self._wake = wake
        self._clock = clock
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._holder: BlockHolder | None = None
        self._state_holder: BlockHolder | None = None
        self.blocks: SizeClass | None = None
        """Tiers of KV blocks, or None before ``begin`` was called."""
        self.states: SizeClass | None = None
        """Tiers of states of recurrent layers, or None for a model without recurrent layers."""
        self._peers: PeerLoads | None = None
        self._loads: dict[int, _Load] = {}
        self._ended: list[LoadEnded] = []
        self._last = 0
        self._under_way: set[Future[Any]] = set()

    def attach(self, blocks: BlockHolder) -> None:
        self._holder = blocks

    def attach_states(self, states: BlockHolder) -> None:
        self._state_holder = states

    def begin(self, blocks: TierPlan, states: TierPlan | None = None) -> None:
        """Start the connector. The KV cache must be allocated.

        Args:
            blocks: Tiers of KV blocks.
            states: Tiers of states of recurrent layers, if the model has them.
        """
        if self._holder is None:
            raise RuntimeError("begin() was called before attach(); call attach() first")
        self.blocks = SizeClass(blocks, self._holder, self._follow, self._clock)
        if states is not None:
            if self._state_holder is None:
                raise RuntimeError("begin() was called before attach_states(); call attach_states() first")
            self.states = SizeClass(states, self._state_holder, self._follow, self._clock)

    def take_from(self, peers: PeerTier) -> None:
        """Let the connector also load blocks from other engines, after this call. Raises RuntimeError if ``begin`` was
        not called.
        """
        if self.blocks is None:
            raise RuntimeError("take_from() was called before begin(); call begin() first")
        self._peers = PeerLoads(peers, self.blocks.copier, None if self.states is None else self.states.copier)

    @property
    def _classes(self) -> list[SizeClass]:
        return [tiers for tiers in (self.blocks, self.states) if tiers is not None]

    def _class_of(self, name: BlockName) -> SizeClass:
        tiers = self.states if name.group == STATE_GROUP else self.blocks
        if tiers is None:
            raise RuntimeError(
                f"{name} was used before begin() was called with the tiers for blocks of this kind; call begin() first"
            )
        return tiers

    def check(self, params: Mapping[str, Any]) -> None:  # noqa: ARG002 - a protocol
        raise Unimplemented(
            f"{PARAMS_FIELD} is set, but kv_transfer.connector is empty; only a plugin's connector accepts this field",
            field=PARAMS_FIELD,
        )

    def answer(self, request: Request) -> Mapping[str, Any] | None:  # noqa: ARG002 - a protocol
        """See ``KVConnector``. The result is always None, because another field of the response names the source of the
        request's blocks.
        """
        return None

    def lookup(self, request: Request, names: Sequence[Sequence[BlockName]]) -> int:
        count = 0
        for of_place in names:
            if not all(self._where(request, name) for name in of_place):
                break
            count += 1
        return count

    def _where(self, request: Request, name: BlockName) -> KvMedium | None:
        if (medium := self._class_of(name).where(name)) is not None:
            return medium
        return KvMedium.PEER if self._peers is not None and self._peers.has(request, name) else None

    def seconds(self, request: Request, names: Sequence[BlockName]) -> float:
        """See ``KVConnector``. A load from host memory counts as 0 seconds, because it is done when the running step
        ends. A request that computes its tokens would also have to wait for the end of that step.
        """
        counts = Counter((name.group == STATE_GROUP, self._where(request, name)) for name in names)
        seconds = 0.0
        for (of_states, medium), count in counts.items():
            tiers = self.states if of_states else self.blocks
            if tiers is not None and medium is not None:
                seconds += tiers.rates.seconds(medium, count)
        return seconds

    def load(self, request: Request, places: Sequence[Place]) -> int:
        self._last += 1
        load = self._loads[self._last] = _Load(self._last, self._clock(), request.context.trace_context)
        of: dict[tuple[bool, KvMedium | None], list[Place]] = {}
        for place in places:
            key = place.name.group == STATE_GROUP, self._where(request, place.name)
            of.setdefault(key, []).append(place)
        for of_states, tiers in ((False, self.blocks), (True, self.states)):
            if tiers is None:
                continue
            if tiers.host is not None and (here := of.get((of_states, KvMedium.HOST))):
                load.begin(KvMedium.HOST, 1, len(here))
                slots, copied = tiers.host.load(here)
                self._follow(copied, partial(self._loaded, load, tiers, here, slots))
            if tiers.disk is not None and (there := of.get((of_states, KvMedium.DISK))):
                load.begin(KvMedium.DISK, tiers.disk.num_batches(len(there)), len(there))
                tiers.disk.load(there, partial(self._tell_read, load, tiers))
        away = [*of.get((False, KvMedium.PEER), ()), *of.get((True, KvMedium.PEER), ())]
        if self._peers is not None and away:
            load.parts += 1
            load.at_peer = self._peers.load(request, away, partial(self._tell_fetched, load))
        if not load.parts:  # The load has nothing to copy, so the end of no copy would wake the busy loop.
            self._end(load)
            self._wake()
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
        """See ``KVConnector``. The method does nothing, because blocks are saved when they lose their last
        reference.
        """

    def on_freed(self, places: Sequence[Place]) -> None:
        for tiers, of_class in self._by_class(places):
            if tiers.host is not None:
                tiers.host.freed(of_class)

    def on_evicted(self, places: Sequence[Place]) -> None:
        for tiers, of_class in self._by_class(places):
            if tiers.host is not None:
                tiers.host.taken(place.name for place in of_class)

    def _by_class(self, places: Sequence[Place]) -> list[tuple[SizeClass, list[Place]]]:
        of_states = [place for place in places if place.name.group == STATE_GROUP]
        of_blocks = [place for place in places if place.name.group != STATE_GROUP]
        return [(self._class_of(some[0].name), some) for some in (of_blocks, of_states) if some]

    def take_ended(self) -> list[LoadEnded]:
        while not self._news.empty():
            self._news.get()()
        for tiers in self._classes:
            if tiers.host is not None:
                tiers.host.save()
        ended, self._ended = self._ended, []
        return ended

    @property
    def has_news(self) -> bool:
        return bool(self._ended) or not self._news.empty()

    @property
    def num_held_blocks(self) -> int:
        return 0 if self.blocks is None or self.blocks.host is None else self.blocks.host.num_held_blocks

    @property
    def _saves(self) -> bool:
        """Whether a save of a block or state to host memory is in flight."""
        return any(tiers.host is not None and tiers.host.num_held_blocks for tiers in self._classes)

    def stats(self) -> TierStats:
        """Return the statistics of the tiers of KV blocks. Thread-safe."""
        if self.blocks is None:
            return TierStats(None, None, 0, 0, dict.fromkeys(KvMedium, 0), 0)
        return self.blocks.stats()

    def state_stats(self) -> TierStats | None:
        """Return the statistics of the tiers of recurrent states, or None for a model without recurrent layers.
        Thread-safe.
        """
        return None if self.states is None else self.states.stats()

    @property
    def disk_busy(self) -> bool:
        """Whether blocks or states are being written to the disk."""
        return any(tiers.disk is not None and tiers.disk.busy for tiers in self._classes)

    def settle(self) -> None:
        for tiers in self._classes:
            if tiers.host is not None:
                tiers.host.drop_queued()
        for number in self._loads:
            self.abandon(number)
        while self._loads or self._saves:
            for future in list(self._under_way):
                future.exception()
            self._news.get()()

    def reset(self) -> None:
        for tiers in self._classes:
            if tiers.host is not None:
                tiers.host.clear()
            if tiers.disk is not None:
                tiers.disk.clear()

    def shutdown(self) -> None:
        """See ``KVConnector``. Blocks and states that are in host memory but not on the disk are written to the disk,
        within a time limit. States and blocks get half of the time each, because they are only useful together.
        """
        began = time.monotonic()
        classes = [tiers for tiers in self._classes if tiers.disk is not None]
        for number, tiers in enumerate(classes, 1):
            disk, tiers.disk = tiers.disk, None
            if disk is not None:
                if tiers.host is not None:
                    self._keep_all(disk, tiers.host, began + _LAST_SECONDS * number / len(classes))
                disk.close()

    def _keep_all(self, disk: DiskTier, host: HostTier, deadline: float) -> None:
        """Write the blocks of the host memory tier to the disk, most recently used first, until ``deadline``."""
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
            """Queue the event that a copy has ended. Thread-safe."""
            self._news.put(partial(self._over, done, then))
            self._wake()

        self._under_way.add(future)
        future.add_done_callback(over)

    def _over(self, future: "Future[Any]", then: Done) -> None:
        self._under_way.discard(future)
        then(future)

    def _loaded(
        self, load: _Load, tiers: SizeClass, places: list[Place], slots: list[int], done: "Future[list[int]]"
    ) -> None:
        error = done.exception()
        if error is None:
            damaged = set(done.result())
            of_slots = list(zip(places, slots, strict=True))
            load.arrived += [(place, KvMedium.HOST) for place, slot in of_slots if slot not in damaged]
            if damaged and tiers.host is not None:
                logger.warning(
                    "states of recurrent layers in host memory are damaged, so the engine recomputes them num_states=%d",
                    len(damaged),
                )
                tiers.host.dropped([place for place, slot in of_slots if slot in damaged])
        elif tiers.host is not None:
            tiers.host.fail(error)
        self._part_of_tier_over(load, KvMedium.HOST)

    def _tell_read(
        self, load: _Load, tiers: SizeClass, places: list[Place], arrived: list[Place], seconds: float
    ) -> None:
        """Queue the event that a batch was read from the disk. Thread-safe."""
        self._news.put(partial(self._read, load, tiers, places, arrived, seconds))
        self._wake()

    def _read(self, load: _Load, tiers: SizeClass, places: list[Place], arrived: list[Place], seconds: float) -> None:
        load.arrived += [(place, KvMedium.DISK) for place in arrived]
        tiers.rates.loaded(KvMedium.DISK, len(arrived), seconds)
        if tiers.disk is not None and len(arrived) < len(places):
            tiers.disk.dropped([place for place in places if place not in arrived])
        self._part_of_tier_over(load, KvMedium.DISK)

    def _tell_fetched(self, load: _Load, places: list[Place]) -> None:
        """Queue the event that a load from another engine has ended. Thread-safe."""
        self._news.put(partial(self._fetched, load, places))
        self._wake()

    def _fetched(self, load: _Load, places: list[Place]) -> None:
        load.arrived += [(place, KvMedium.PEER) for place in places]
        num_blocks = sum(place.name.group != STATE_GROUP for place in places)
        if self.blocks is not None:
            self.blocks.rates.loaded(KvMedium.PEER, num_blocks, self._clock() - load.began)
        if self._peers is not None:
            self._peers.taken(load.at_peer)
        self._part_over(load)

    def _part_of_tier_over(self, load: _Load, medium: KvMedium) -> None:
        load.parts_of[medium] -= 1
        if not load.parts_of[medium]:
            self._tell_of(load, medium, load.num_wanted[medium])
        self._part_over(load)

    def _tell_of(self, load: _Load, medium: KvMedium, wanted: int) -> None:
        """Pass a finished transfer from host memory or disk to ``observe``."""
        sizes = [self._class_of(place.name).copier.block_bytes for place, found in load.arrived if found is medium]
        outcome = outcome_of(wanted, len(sizes))
        self.observe(
            Transfer(load.headers, medium, "", load.began, self._clock(), wanted, len(sizes), sum(sizes), outcome)
        )

    def _part_over(self, load: _Load) -> None:
        load.parts -= 1
        if not load.parts:
            self._end(load)

    def _end(self, load: _Load) -> None:
        del self._loads[load.number]
        for place, medium in load.arrived:
            self._class_of(place.name).num_loaded[medium] += 1
        self._ended.append(LoadEnded(load.number, tuple(load.arrived)))
