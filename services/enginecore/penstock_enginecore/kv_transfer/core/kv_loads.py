"""Waiting requests whose blocks are brought from elsewhere, in place of being computed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock_common.types.kv_transfer import BlockName, KvMedium
from penstock_common.types.outputs import KvTransferStats
from penstock_enginecore.core.kv_cache.block_pool import BlockLog, ComputedBlocks, KVCacheBlock
from penstock_enginecore.core.request import Hold, Request
from penstock_enginecore.core.scheduler.base import Admission, StepResource
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.core.scheduler.state import SchedulerState
from penstock_enginecore.kv_transfer.core.base import KVConnector, LoadEnded, Place
from penstock_enginecore.kv_transfer.core.plan import LoadPlan
from penstock_enginecore.kv_transfer.core.transfer_stats import ComputeRate

# Whose loads are under way, who else waits for them, and that a block is on its way once at a time.


@dataclass(slots=True)
class Load:
    """``owner``: key of the request that has it in place of its turn; None once that has left. ``waiting``: keys of others whose
    blocks it brings.
    """

    number: int
    places: tuple[Place, ...]
    owner: str | None
    waiting: dict[str, None] = field(default_factory=dict)


class Loads:
    """A load begins with an owner. That may leave before it is over: nobody wants the load any more then, and its blocks stay as
    they are until it has ended, which it does once.
    """

    def __init__(self) -> None:
        self._loads: dict[int, Load] = {}
        self._bringing: dict[BlockName, int] = {}
        self._of_owner: dict[str, int] = {}
        self._of_waiting: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def num_blocks(self) -> int:
        """That are on their way."""
        return len(self._bringing)

    @property
    def num_left_blocks(self) -> int:
        """Of these, those that nobody wants."""
        return sum(len(load.places) for load in self._loads.values() if load.owner is None)

    def bringing(self, names: Iterable[BlockName]) -> int | None:
        """The load that brings the first of these that is on its way."""
        bringing = self._bringing
        return next((bringing[name] for name in names if name in bringing), None) if bringing else None

    def begin(self, number: int, places: Sequence[Place], owner: str) -> None:
        """ValueError for a block that is on its way already, or an owner that has a load or waits for one."""
        if owner in self._of_owner or owner in self._of_waiting:
            raise ValueError(f"{owner} has a load already")
        if any(place.name in self._bringing for place in places):
            raise ValueError(f"load {number} brings what is on its way already")
        self._loads[number] = Load(number, tuple(places), owner)
        self._of_owner[owner] = number
        for place in places:
            self._bringing[place.name] = number

    def wait(self, number: int, key: str) -> None:
        """A request waits for the end of a load. ValueError for one that waits already."""
        if key in self._of_owner or key in self._of_waiting:
            raise ValueError(f"{key} waits already")
        self._loads[number].waiting[key] = None
        self._of_waiting[key] = number

    def leave(self, key: str) -> int | None:
        """A request has ended, or has lost its turn. Returns the number of the load that nobody wants any more."""
        if (number := self._of_waiting.pop(key, None)) is not None:
            del self._loads[number].waiting[key]
            return None
        number = self._of_owner.pop(key, None)
        if number is not None:
            self._loads[number].owner = None
        return number

    def end(self, number: int) -> Load:
        """It is over. KeyError for one that is not under way."""
        load = self._loads.pop(number)
        for place in load.places:
            del self._bringing[place.name]
        if load.owner is not None:
            del self._of_owner[load.owner]
        for key in load.waiting:
            del self._of_waiting[key]
        return load


_MEDIA = (KvMedium.HOST, KvMedium.DISK, KvMedium.PEER)


class KvLoads(StepResource):
    """What the scheduler does with a ``KVConnector``.

    A request whose blocks are brought waits with ``Hold.KV_TRANSFER``, and has a slot and blocks: it keeps what the pool has
    of its prefix, while the load keeps the blocks that are written. When the load has ended the request keeps what there is, and
    is the next that starts. Until then it can be made to give up its blocks, before requests that run. Others that need the same
    blocks wait with the same hold, and have none. Fewer than ``min_load_tokens`` tokens are computed. By urgency, the least
    urgent gives up its blocks; first come, first served, the one that began last.
    """

    stats_name = "kv_transfer"

    def __init__(self, state: SchedulerState, connector: KVConnector) -> None:
        self._connector = connector
        self._leases = state.leases
        self._kv_cache = state.kv_cache
        self._pool = state.kv_cache.pool
        self._waiting = state.waiting
        self._running = state.running
        self._clock = state.clock
        self._min_tokens = state.context.min_load_tokens
        self._by_priority = state.by_priority
        self._rate = ComputeRate()
        self._loads = Loads()
        self._for: dict[int, Request] = {}
        """By load, whom it was begun for, also when that has left."""
        self._others: dict[str, Request] = {}
        """Those that wait for the load of another, by key."""
        self._held: dict[str, Request] = {}
        """With blocks, by key, in the order in which their loads began."""
        self._ready: dict[str, Request] = {}
        """Of these, those whose load has ended."""
        self._step_began: dict[int, float] = {}
        self._last_results = 0.0
        self.num_loads = 0
        """Since the start."""
        self._log = self._pool.log = BlockLog()
        connector.attach(self)

    def __len__(self) -> int:
        """Requests that have a slot and blocks, and do not run."""
        return len(self._held)

    def holds(self, request: Request) -> bool:
        """Return whether this request has blocks and does not run."""
        return request.key in self._held

    def stats(self) -> KvTransferStats:
        """What came from elsewhere, and what is kept for others."""
        return self._leases.stats(self._kv_cache.external_stats)

    def has_others(self, request: Request) -> bool:
        """Return whether any request but this one has blocks and does not run."""
        return len(self._held) > (request.key in self._held)

    @property
    def has_news(self) -> bool:
        """Whether ``begin_step`` has something to do."""
        return self._connector.has_news or bool(self._log)

    # Requests.

    def added(self, request: Request) -> None:
        """Tell the connector about a new request."""
        self._connector.opened(request)

    def answer(self, request: Request) -> str:
        """What is told of a request that has ended as it should, as JSON; empty: nothing."""
        said = self._connector.answer(request)
        return "" if said is None else msgspec.json.encode(said).decode()

    def ended(self, request: Request) -> None:
        """Abandon the request's load, and tell the connector that the request has ended."""
        self._leave(request)
        self._connector.closed(request)

    def load(self, request: Request, computed: ComputedBlocks, reserve: Callable[[int], int]) -> Admission | None:
        """Begin a load of the blocks of the request at the head of the queue, if that is faster than computing them, and hold the
        request.
        """
        if request.hold or request.skip_reading_prefix_cache or not self._kv_cache.reuses:
            return None
        plan = self._kv_cache.plan_load(request, lambda names: self._connector.lookup(request, names))
        num_tokens = min(plan.num_blocks * self._kv_cache.block_size, request.num_tokens - 1)
        if not plan.missing or num_tokens - computed.num_tokens < self._min_tokens:
            return None
        if (number := self._loads.bringing(plan.missing)) is not None:
            self._loads.wait(number, request.key)
            self._others[request.key] = request
            self._waiting.hold(request, Hold.KV_TRANSFER)
            return Admission.BLOCKED
        alone = not self._running and not self._held
        spare = 0 if alone else reserve(num_tokens)
        if len(plan.missing) + self._pool.num_free_among(plan.there) + spare > self._pool.num_free_blocks:
            return None if alone and not self.num_returning else Admission.NO_ROOM
        if not self._rate.pays(self._connector.seconds(request, plan.missing), num_tokens - computed.num_tokens):
            return None
        self._begin(request, plan)
        return Admission.BLOCKED

    def _begin(self, request: Request, plan: LoadPlan) -> None:
        self._kv_cache.hold(request, plan.there)
        blocks = self._pool.allocate(len(plan.missing))
        places = [Place(name, block.block_id) for name, block in zip(plan.missing, blocks, strict=True)]
        number = self._connector.load(request, places)
        self._loads.begin(number, places, request.key)
        self.num_loads += 1
        self._for[number] = request
        self._held[request.key] = request
        self._waiting.hold(request, Hold.KV_TRANSFER)

    @property
    def ready(self) -> list[Request]:
        """Those that wait for nothing but to be started, in order."""
        return [request for request in self._ready.values() if request.hold == Hold.KV_TRANSFER] if self._ready else []

    def started(self, request: Request, num_computed: int, count: int) -> None:
        """Count the tokens that a request need not compute."""
        if request.num_cached_tokens < 0:
            loaded = request.num_loaded_tokens
            self._kv_cache.external_stats.queries += request.num_tokens - num_computed + loaded
            self._kv_cache.external_stats.hits += loaded
        self._held.pop(request.key, None)
        self._ready.pop(request.key, None)

    # Room.

    def give_up_one(self, *, keep: Request | None = None) -> bool:
        """Make one request that does not run, other than ``keep``, give up its blocks and wait for its turn again. Return False
        when there is none, or all are more urgent than those that run.
        """
        held = [request for request in self._held.values() if request is not keep]
        if not held:
            return False
        victim = held[-1]
        if self._by_priority:
            rank = self._waiting.rank
            victim = max(held, key=rank)
            if self._running and rank(self._running.least_urgent()) > rank(victim):
                return False
        self.give_up(victim)
        return True

    @property
    def returns_blocks(self) -> bool:
        """Whether blocks that no request has will be free once they have been copied."""
        return self.num_returning > 0

    def all_preempted(self) -> None:
        """Make all requests give up their blocks. No step in flight has results any more."""
        self.give_up_all()
        self._step_began.clear()

    def give_up_all(self) -> None:
        """All of them give up their blocks."""
        for request in list(self._held.values()):
            self.give_up(request)

    def give_up(self, request: Request) -> None:
        """One of them gives up its slot and its blocks."""
        self._leave(request)
        if request.num_cached_tokens < 0:
            request.loaded_tokens = ()
        self._kv_cache.free(request)
        self._waiting.release(request, Hold.KV_TRANSFER)

    def _leave(self, request: Request) -> None:
        key = request.key
        if (number := self._loads.leave(key)) is not None:
            self._connector.abandon(number)
        self._others.pop(key, None)
        if self._held.pop(key, None) is not None:
            self._ready.pop(key, None)

    @property
    def num_returning(self) -> int:
        """Blocks that no request has and that come back soon: they are being copied."""
        return self._loads.num_left_blocks + self._connector.num_held_blocks

    def settle(self) -> None:
        """Wait until nothing but requests that run has blocks, and forget what is kept elsewhere: it is of no use any more."""
        self.give_up_all()
        self._connector.settle()
        self._take_ended()
        self._log.take()
        self._connector.reset()

    # What a connector may ask.

    @property
    def num_spare(self) -> int:
        """See ``BlockHolder``. What those that run take in a step stays free, on the average."""
        running = (len(self._running) + len(self._held)) * len(self._kv_cache.groups)
        return self._pool.num_free_blocks - (running and 1 + running // self._kv_cache.block_size)

    def hold(self, place: Place) -> bool:
        name, block = place.name, self._pool.blocks[place.block_id]
        if block.ref_count or block.block_hash != name.hash or block.group != name.group:
            return False
        self._pool.touch((block,))
        return True

    def release(self, place: Place) -> None:
        """See ``BlockHolder``. The connector need not be told of what it does itself, and must not: it would save it again."""
        block = self._pool.blocks[place.block_id]
        self._pool.free((block,))
        if self._log.freed and self._log.freed[-1] is block:
            self._log.freed.pop()

    def findable(self, medium: KvMedium, name: BlockName, is_there: bool) -> None:
        self._kv_cache.findable(medium, name, is_there)

    # Steps.

    def begin_step(self, *, paused: bool) -> None:
        """Tell the connector which blocks have come and gone, and take in the loads that have ended."""
        if self._log:
            self._tell(self._log.take())
        self._take_ended()

    def _take_ended(self) -> None:
        for ended in self._connector.take_ended():
            self._end(ended)

    def _tell(self, news: BlockLog) -> None:
        if news.evicted:
            self._connector.on_evicted(
                [Place(BlockName(group, block_hash), block_id) for group, block_hash, block_id in news.evicted]
            )
        if news.cached:
            self._connector.on_cached(
                [_place(block, block.block_hash) for block in news.cached if block.block_hash is not None]
            )
        if freed := [
            _place(block, block.block_hash)
            for block in dict.fromkeys(news.freed)
            if block.ref_count == 0 and block.block_hash is not None
        ]:
            self._connector.on_freed(freed)

    def end_step(self, output: SchedulerOutput) -> None:
        """A step that is handed over."""
        if output.total_num_scheduled_tokens >= self._min_tokens:
            self._step_began[output.step] = self._clock()

    def stepped(self, output: SchedulerOutput) -> None:
        """Its results are there."""
        began, now = self._step_began.pop(output.step, None), self._clock()
        if began is not None:
            self._rate.computed(output.total_num_scheduled_tokens, now - max(began, self._last_results))
        self._last_results = now

    def _end(self, ended: LoadEnded) -> None:
        load, request = self._loads.end(ended.load_id), self._for.pop(ended.load_id)
        self._kv_cache.arrived(request, [place for place, _ in ended.arrived])
        if load.owner is not None:
            computed = self._kv_cache.get_computed_blocks(request)
            self._kv_cache.hold(request, computed.blocks)
            if request.num_cached_tokens < 0:
                request.loaded_tokens = self._loaded(request, ended, computed)
            self._ready[request.key] = request
        self._pool.free([self._pool.blocks[place.block_id] for place in load.places])
        for key in load.waiting:
            self._waiting.release(self._others.pop(key), Hold.KV_TRANSFER)

    def _loaded(self, request: Request, ended: LoadEnded, computed: ComputedBlocks) -> tuple[int, ...]:
        """Tokens of what it starts with, by medium."""
        of_prefix = set(request.block_hashes[: computed.num_blocks])
        media: dict[bytes, KvMedium] = {}
        for place, medium in ended.arrived:
            if place.name.hash in of_prefix:
                media[place.name.hash] = max(medium, media.get(place.name.hash, medium))
        size, left = self._kv_cache.block_size, computed.num_tokens
        counts = []
        for medium in _MEDIA:
            count = min(size * sum(each is medium for each in media.values()), left)
            left -= count
            counts.append(count)
        return tuple(counts)


def _place(block: KVCacheBlock, block_hash: bytes) -> Place:
    return Place(BlockName(block.group, block_hash), block.block_id)
