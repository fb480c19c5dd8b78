"""Handling of waiting requests whose KV blocks are loaded instead of computed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock_common.types.kv_transfer import STATE_GROUP, BlockName, KvMedium
from penstock_common.types.outputs import KvTransferStats
from penstock_enginecore.core.kv_cache.block_pool import BlockLog, ComputedBlocks, KVCacheBlock
from penstock_enginecore.core.request import Hold, Request
from penstock_enginecore.core.scheduler.base import Admission, StepResource
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.core.scheduler.state import SchedulerState
from penstock_enginecore.kv_transfer.core.base import KVConnector, LoadEnded, Place
from penstock_enginecore.kv_transfer.core.plan import LoadPlan
from penstock_enginecore.kv_transfer.core.transfer_stats import ComputeRate

# Records of loads in flight: the owner of each load (the request for which the load began), and the requests that wait
# for the load. Two loads in flight never load the same block.


@dataclass(slots=True)
class Load:
    """A load in flight.

    Attributes:
        number: Number of the load.
        places: The blocks of the pool that the load writes.
        owner: Key of the request for which the load was begun. None once that request has ended or no longer waits for
            the load.
        waiting: Keys of other requests that wait for the load's blocks.
    """

    number: int
    places: tuple[Place, ...]
    owner: str | None
    waiting: dict[str, None] = field(default_factory=dict)


class Loads:
    """Loads in flight, each with an owner: the request for which the load began.

    If the owner ends or stops waiting before the load has ended, the load is abandoned. The blocks of an abandoned load
    stay allocated until the load ends. Every load ends exactly once.
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
        """Number of blocks that loads in flight write."""
        return len(self._bringing)

    @property
    def num_left_blocks(self) -> int:
        """Number of blocks that abandoned loads in flight write."""
        return sum(len(load.places) for load in self._loads.values() if load.owner is None)

    def bringing(self, names: Iterable[BlockName]) -> int | None:
        """Return the number of the load in flight that loads one of ``names``, or None. If there are several such
        loads, return the load of the first such name.
        """
        bringing = self._bringing
        return next((bringing[name] for name in names if name in bringing), None) if bringing else None

    def begin(self, number: int, places: Sequence[Place], owner: str) -> None:
        """Add a load that has begun. Raises ValueError if one of its blocks is already being loaded, or if the owner
        already has a load or waits for a load.
        """
        if owner in self._of_owner or owner in self._of_waiting:
            raise ValueError(f"request {owner} already has a load or waits for one")
        if any(place.name in self._bringing for place in places):
            raise ValueError(f"load {number} has a block that another load is already writing")
        self._loads[number] = Load(number, tuple(places), owner)
        self._of_owner[owner] = number
        for place in places:
            self._bringing[place.name] = number

    def wait(self, number: int, key: str) -> None:
        """Make a request wait for the end of a load. Raises ValueError if the request already has a load or waits for a
        load.
        """
        if key in self._of_owner or key in self._of_waiting:
            raise ValueError(f"request {key} already has a load or waits for one")
        self._loads[number].waiting[key] = None
        self._of_waiting[key] = number

    def leave(self, key: str) -> int | None:
        """Remove a request that has ended or no longer waits. If the request owned a load, this load is now abandoned.
        Return the number of the abandoned load, or None.
        """
        if (number := self._of_waiting.pop(key, None)) is not None:
            del self._loads[number].waiting[key]
            return None
        number = self._of_owner.pop(key, None)
        if number is not None:
            self._loads[number].owner = None
        return number

    def end(self, number: int) -> Load:
        """Remove a load that has ended. Raises KeyError if the load is not in flight."""
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
    """``StepResource`` that connects the scheduler to a ``KVConnector``.

    A request whose blocks are being loaded is held with ``Hold.KV_TRANSFER``, and counts against the limit of running
    requests. The request has references to the cached blocks of its prefix, and the load has references to the blocks
    that it writes. When the load has ended, the request keeps the blocks that arrived, and starts before other waiting
    requests. Until the request starts, the scheduler can free the request's blocks. The scheduler frees such blocks
    before it preempts running requests.

    States of recurrent layers are loaded like blocks, but into slots of the state pool. A load has at most one state:
    the state at the end of the loaded prefix. Blocks without memory, which only carry hashes, have no content to load.
    They become findable when the load ends.

    Other requests that need the same blocks are held in the same way, but have no blocks. The scheduler does not begin
    loads of fewer than ``min_load_tokens`` tokens. If blocks of such requests must be freed, the policy decides the
    order. With the priority policy, the least urgent request loses its blocks first. With FCFS, the request whose load
    began last loses its blocks first.
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
        self._for: dict[int, tuple[Request, int]] = {}
        """Request for which each load began, and the number of the request's prefix blocks that were already in the
        pool, by number of the load. The request may have ended.
        """
        self._others: dict[str, Request] = {}
        """Requests that wait for the load of another request, by key."""
        self._held: dict[str, Request] = {}
        """Waiting requests that have blocks, by key, in the order in which their loads began."""
        self._ready: dict[str, Request] = {}
        """Waiting requests that have blocks and whose load has ended, by key."""
        self._step_began: dict[int, float] = {}
        self._last_results = 0.0
        self.num_loads = 0
        """Number of loads that began since the engine started."""
        self._states = self._kv_cache.states
        self._without_memory = {number for number, group in enumerate(self._kv_cache.groups) if not group.has_memory}
        self._log = BlockLog()
        self._state_log = BlockLog()
        if not self._without_memory:
            self._pool.log = self._log
        connector.attach(self)
        if self._states is not None:
            self._states.pool.log = self._state_log
            connector.attach_states(self._states)

    def __len__(self) -> int:
        """Return the number of requests that have blocks but are not running."""
        return len(self._held)

    def holds(self, request: Request) -> bool:
        """Return whether the request has blocks but is not running."""
        return request.key in self._held

    def stats(self) -> KvTransferStats:
        """Return statistics of tokens found outside the KV cache, and of leases."""
        return self._leases.stats(self._kv_cache.external_stats)

    def has_others(self, request: Request) -> bool:
        """Return whether any other request has blocks but is not running."""
        return len(self._held) > (request.key in self._held)

    @property
    def has_news(self) -> bool:
        """Whether ``begin_step`` has events to process."""
        return self._connector.has_news or bool(self._log) or bool(self._state_log)

    # Events of requests.

    def added(self, request: Request) -> None:
        """Notify the connector of a new request."""
        self._connector.opened(request)

    def answer(self, request: Request) -> str:
        """Return the connector's response for a request that ended normally, as JSON. The result is empty if the
        connector returns no response.
        """
        said = self._connector.answer(request)
        return "" if said is None else msgspec.json.encode(said).decode()

    def ended(self, request: Request) -> None:
        """Abandon the request's load, and notify the connector of the request's end."""
        self._leave(request)
        self._connector.closed(request)

    def load(self, request: Request, computed: ComputedBlocks, reserve: Callable[[int], int]) -> Admission | None:
        """Begin to load blocks of the request at the head of the queue, if loading is faster than computing. If a load
        begins, or another load in flight has the blocks, the request is held.
        """
        if request.hold or request.skip_reading_prefix_cache or not self._kv_cache.reuses:
            return None
        plan = self._kv_cache.plan_load(request, lambda names: self._connector.lookup(request, names))
        num_tokens = min(plan.num_blocks * self._kv_cache.block_size, request.num_tokens - 1)
        wanted = plan.missing if plan.state is None else [*plan.missing, plan.state]
        if not wanted or num_tokens - computed.num_tokens < self._min_tokens:
            return None
        if (number := self._loads.bringing(wanted)) is not None:
            self._loads.wait(number, request.key)
            self._others[request.key] = request
            self._waiting.hold(request, Hold.KV_TRANSFER)
            return Admission.BLOCKED
        if self._states is not None and self._states.num_spare < 1:
            # No state slot is free: all slots belong to running requests or are reserved for requests that can still
            # start.
            return None
        alone = not self._running and not self._held
        spare = 0 if alone else reserve(num_tokens)
        if len(plan.missing) + self._pool.num_free_among(plan.there) + spare > self._pool.num_free_blocks:
            return None if alone and not self.num_returning else Admission.NO_ROOM
        if not self._rate.pays(self._connector.seconds(request, wanted), num_tokens - computed.num_tokens):
            return None
        self._begin(request, plan, computed.num_blocks)
        return Admission.BLOCKED

    def _begin(self, request: Request, plan: LoadPlan, num_computed: int) -> None:
        self._kv_cache.hold(request, plan.there, plan.num_blocks)
        blocks = self._pool.allocate(len(plan.missing))
        places = [Place(name, block.block_id) for name, block in zip(plan.missing, blocks, strict=True)]
        if plan.state is not None and self._states is not None:
            places.append(Place(plan.state, self._states.begin_load()))
        number = self._connector.load(request, [place for place in places if self._has_memory(place.name)])
        self._loads.begin(number, places, request.key)
        self.num_loads += 1
        self._for[number] = request, num_computed
        self._held[request.key] = request
        self._waiting.hold(request, Hold.KV_TRANSFER)

    def _has_memory(self, name: BlockName) -> bool:
        """Return whether a block or state has content to load. Blocks of a model without attention have no content, and
        only carry the hash of a prefix.
        """
        return name.group not in self._without_memory

    @property
    def ready(self) -> list[Request]:
        """Requests whose load has ended and that can start now, in the order in which to start them."""
        return [request for request in self._ready.values() if request.hold == Hold.KV_TRANSFER] if self._ready else []

    def started(self, request: Request, num_computed: int, count: int) -> None:
        """Count the loaded tokens, which a starting request need not compute, in the statistics."""
        if request.num_cached_tokens < 0:
            loaded = request.num_loaded_tokens
            self._kv_cache.external_stats.queries += request.num_tokens - num_computed + loaded
            self._kv_cache.external_stats.hits += loaded
        self._held.pop(request.key, None)
        self._ready.pop(request.key, None)

    # Freeing of blocks.

    def give_up_one(self, *, keep: Request | None = None) -> bool:
        """Free the blocks of one waiting request other than ``keep``, and queue that request again.

        Return False if there is no such request, or if all such requests are more urgent than the running requests.
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
        """Whether blocks that belong to no request will be free soon, when a copy ends."""
        return self.num_returning > 0

    def all_preempted(self) -> None:
        """Free the blocks of all waiting requests after every running request was preempted, and forget the start times
        of steps in flight.
        """
        self.give_up_all()
        self._step_began.clear()

    def give_up_all(self) -> None:
        """Free the blocks of all waiting requests, and queue these requests again."""
        for request in list(self._held.values()):
            self.give_up(request)

    def give_up(self, request: Request) -> None:
        """Free the blocks of a waiting request, and queue the request again."""
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
        """Number of blocks that belong to no request and will be free soon, when copies end."""
        return self._loads.num_left_blocks + self._connector.num_held_blocks

    def settle(self) -> None:
        """End all loads, and wait until only running requests have blocks. Then drop all blocks that are stored outside
        the pool, because these blocks are invalid now.
        """
        self.give_up_all()
        self._connector.settle()
        self._take_ended()
        self._log.take()
        self._state_log.take()
        self._connector.reset()

    # Methods for connectors.

    @property
    def num_spare(self) -> int:
        """See ``BlockHolder``. The number excludes the blocks that running requests need in an average step."""
        running = (len(self._running) + len(self._held)) * len(self._kv_cache.groups)
        return self._pool.num_free_blocks - (running and 1 + running // self._kv_cache.block_size)

    def hold(self, place: Place) -> bool:
        return self._pool.hold(place.block_id, place.name.hash, place.name.group)

    def release(self, place: Place) -> None:
        """See ``BlockHolder``. The release is not recorded in the block log, because the connector would otherwise save
        the block again.
        """
        self._pool.release(place.block_id)

    def findable(self, medium: KvMedium, name: BlockName, is_there: bool) -> None:
        self._kv_cache.findable(medium, name, is_there)

    # Events of steps.

    def begin_step(self, *, paused: bool) -> None:
        """Notify the connector of cached, freed and evicted blocks and states, and process loads that have ended."""
        for log in (self._log, self._state_log):
            if log:
                self._tell(log.take(), of_states=log is self._state_log)
        self._take_ended()

    def _take_ended(self) -> None:
        for ended in self._connector.take_ended():
            self._end(ended)

    def _tell(self, news: BlockLog, *, of_states: bool) -> None:
        def place_of(block: KVCacheBlock, block_hash: bytes) -> Place:
            return Place(BlockName(STATE_GROUP if of_states else block.group, block_hash), block.block_id)

        if news.evicted:
            groups = [STATE_GROUP if of_states else group for group, _, _ in news.evicted]
            self._connector.on_evicted(
                [
                    Place(BlockName(group, block_hash), block_id)
                    for group, (_, block_hash, block_id) in zip(groups, news.evicted, strict=True)
                ]
            )
        if news.cached:
            self._connector.on_cached(
                [place_of(block, block.block_hash) for block in news.cached if block.block_hash is not None]
            )
        if freed := [
            place_of(block, block.block_hash)
            for block in dict.fromkeys(news.freed)
            if block.ref_count == 0 and block.block_hash is not None
        ]:
            self._connector.on_freed(freed)

    def end_step(self, output: SchedulerOutput) -> None:
        """Record the start time of a step with many tokens, to measure how fast the engine computes tokens."""
        if output.total_num_scheduled_tokens >= self._min_tokens:
            self._step_began[output.step] = self._clock()

    def stepped(self, output: SchedulerOutput) -> None:
        """Record how long a step took, from its start or the previous step's results to its own results."""
        began, now = self._step_began.pop(output.step, None), self._clock()
        if began is not None:
            self._rate.computed(output.total_num_scheduled_tokens, now - max(began, self._last_results))
        self._last_results = now

    def _end(self, ended: LoadEnded) -> None:
        load = self._loads.end(ended.load_id)
        request, num_computed = self._for.pop(ended.load_id)
        arrived = [place for place, _ in ended.arrived]
        self._kv_cache.arrived(
            request, [*arrived, *(place for place in load.places if not self._has_memory(place.name))]
        )
        if load.owner is not None:
            computed = self._kv_cache.get_computed_blocks(request)
            self._kv_cache.hold(request, computed.blocks, computed.num_blocks)
            if request.num_cached_tokens < 0:
                request.loaded_tokens = self._loaded(request, ended, computed, num_computed)
            self._ready[request.key] = request
        self._kv_cache.free_loaded(load.places)
        for key in load.waiting:
            self._waiting.release(self._others.pop(key), Hold.KV_TRANSFER)

    def _loaded(
        self, request: Request, ended: LoadEnded, computed: ComputedBlocks, num_computed: int
    ) -> tuple[int, ...]:
        """Return the number of tokens that were loaded from each medium, among the tokens that the request need not
        compute.

        If a state was loaded, all tokens after the first ``num_computed`` blocks count as loaded with the state, even
        if their KV blocks were in the pool.
        """
        of_prefix = set(request.block_hashes[: computed.num_blocks])
        media: dict[bytes, KvMedium] = {}
        for place, medium in sorted(ended.arrived, key=lambda of_place: -of_place[0].name.group):
            if place.name.group == STATE_GROUP and place.name.hash in of_prefix:
                media = dict.fromkeys(request.block_hashes[num_computed : computed.num_blocks], medium)
            elif place.name.hash in of_prefix:
                media[place.name.hash] = max(medium, media.get(place.name.hash, medium))
        size, left = self._kv_cache.block_size, computed.num_tokens
        counts = []
        for medium in _MEDIA:
            count = min(size * sum(each is medium for each in media.values()), left)
            left -= count
            counts.append(count)
        return tuple(counts)
