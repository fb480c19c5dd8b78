"""Slots of recurrent states at the end of spans of tokens (closed states): two slots for each running request, and
slots for kept states of the prefix cache.
"""

from collections.abc import Iterable, Mapping, Sequence

from penstock_common.types.kv_transfer import STATE_GROUP, BlockName, KvMedium
from penstock_common.types.outputs import StateStats
from penstock_enginecore.core.kv_cache.block_pool import BlockPool, KVCacheBlock
from penstock_enginecore.core.kv_cache.events import KvEventLog
from penstock_enginecore.core.request import Request
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.kv_transfer.core.base import Place
from penstock_enginecore.kv_transfer.core.plan import Lookup
from penstock_enginecore.states.core.spec import SLOTS_PER_REQUEST, SPAN, StatePoolConfig, StateStep, span_start

_UNWRITTEN = -1


class _Evictions:
    """Counts states that the pool evicts, and reports to routers the states that are no longer findable.

    Attributes:
        elsewhere: Hashes of the states that are findable on media outside the pool, by medium.
    """

    def __init__(self, events: KvEventLog) -> None:
        self.count = 0
        self.elsewhere: dict[KvMedium, set[bytes]] = {}
        self._events = events

    def removed(self, blocks: Iterable[tuple[int, bytes, int]]) -> None:
        """Record that the pool evicted states. Each state is given as group, hash and slot."""
        for _, block_hash, _ in blocks:
            self.count += 1
            self.lost(block_hash)

    def lost(self, block_hash: bytes) -> None:
        """Report to routers that a state was lost by the pool or another medium, unless another medium still has the
        state.
        """
        if not any(block_hash in hashes for hashes in self.elsewhere.values()):
            self._events.lost(KvMedium.STATE, block_hash)

    def cleared(self) -> None:
        """Do nothing: ``StateSlots.forget`` reports the states that it forgets."""


class _States:
    """States of one running request.

    Attributes:
        rows: Index of the request's ring of open rows.
        own: The two slots that the request owns.
        ends: The positions of the states in ``own`` after all scheduled steps.
        shared: Slots of kept states that the request reads or has written for the prefix cache, by position of the
            state.
        branch: Position at which this request's tokens begin to differ from an earlier request's tokens, or 0. The
            state at this position is kept.
    """

    __slots__ = ("branch", "ends", "own", "rows", "shared")

    def __init__(self, rows: int, own: list[KVCacheBlock], branch: int) -> None:
        self.rows = rows
        self.own = own
        self.ends = [_UNWRITTEN] * len(own)
        self.shared: dict[int, KVCacheBlock] = {}
        self.branch = branch

    def at(self, position: int) -> KVCacheBlock | None:
        """Return the request's slot with the state at ``position``, or None if there is no such slot."""
        if (slot := self.shared.get(position)) is not None:
            return slot
        return self.own[self.ends.index(position)] if position in self.ends else None


class StateSlots:
    """Slots of closed states (states at the end of a span of tokens). The class finds slots by request, and kept states
    by the hash of their prefix.

    From its start to its end, a request owns two slots and a ring of open rows (stored inputs of recent tokens). No
    step can therefore fail for lack of a slot. Each step that completes a span writes the next closed state over the
    older of the request's two states. A state from which later requests may start is written to a third slot. The
    request keeps a reference to this slot until its next span is complete. The pool evicts kept states in LRU order.

    A step in flight may still read or write slots of a request that ended. Such accesses are safe, because a device
    runs its steps in order: the step runs before any step or copy that reuses the slots.

    The class is also the ``BlockHolder`` of a KV connector, which copies kept states to other media and loads them
    again. A request that waits for its start can reserve a kept state.
    """

    def __init__(self, config: StatePoolConfig, *, keeps: bool, events: KvEventLog) -> None:
        """Create the slots.

        Args:
            config: Size of the pool.
            keeps: Whether prefix caching is enabled.
            events: Log of events for routers, to which the class adds kept and evicted states.
        """
        self.config = config
        self._events = events
        self._evictions = _Evictions(events)
        self.pool = BlockPool(config.num_slots, events=self._evictions)
        self._keeps = keeps
        self._free_rows = list(range(config.num_requests - 1, -1, -1))
        self._requests: dict[str, _States] = {}
        self._reserved: dict[str, KVCacheBlock] = {}
        """Slots of kept states that requests have reserved before their start, by request key."""
        self._num_recomputed_tokens = 0

    def longest(self, hashes: Sequence[bytes], num_blocks: int, lookup: Lookup | None = None) -> int:
        """Return the length in blocks of the longest prefix, at most ``num_blocks`` blocks, whose state is kept or can
        be loaded according to ``lookup``.
        """
        for count in range(num_blocks, 0, -1):
            block_hash = hashes[count - 1]
            if self.pool.get(block_hash) is not None:
                return count
            if lookup is not None and lookup([[BlockName(STATE_GROUP, block_hash)]]):
                return count
        return 0

    def missing(self, hashes: Sequence[bytes], num_blocks: int) -> BlockName | None:
        """Return the name of the state at the end of ``num_blocks`` blocks, or None if the pool has this state."""
        if not num_blocks or self.pool.get(hashes[num_blocks - 1]) is not None:
            return None
        return BlockName(STATE_GROUP, hashes[num_blocks - 1])

    def admit(self, request: Request, num_computed_tokens: int, branch: int) -> bool:
        """Give a starting request its slots and its ring of open rows. If there are too few slots or rings, do nothing
        and return False.

        Args:
            request: The request. Its ``block_hashes`` contain the hash of the cached prefix.
            num_computed_tokens: Length in tokens of the cached prefix, or 0. The state at the end of the prefix is
                kept.
            branch: See ``ComputedBlocks.branch``.
        """
        found = self._kept_at(request, num_computed_tokens)
        revived = found is not None and found.ref_count == 0
        if not self._free_rows or self.pool.num_free_blocks < SLOTS_PER_REQUEST + revived:
            return False
        if found is not None:
            self.pool.touch([found])
        states = _States(self._free_rows.pop(), self.pool.allocate(SLOTS_PER_REQUEST), branch)
        if found is None:
            states.shared[0] = self.pool.null_block
        else:
            states.shared[num_computed_tokens] = found
        self._requests[request.key] = states
        self._release_reserved(request)
        if request.num_preemptions == 0 and branch:
            self._num_recomputed_tokens += branch - num_computed_tokens
        return True

    def _kept_at(self, request: Request, position: int) -> KVCacheBlock | None:
        if not position:
            return None
        slot = self.pool.get(request.block_hashes[position // SPAN - 1])
        if slot is None:
            raise RuntimeError(
                f"no state of recurrent layers is kept at position {position} of request {request.key!r}"
            )
        return slot

    def reserve(self, request: Request, position: int) -> None:
        """Reserve the kept state at ``position`` for a request that has not started, if such a state exists. Release
        the state that the request had reserved before.
        """
        index = position // SPAN - 1
        slot = self.pool.get(request.block_hashes[index]) if index >= 0 else None
        if slot is not None:
            self.pool.touch((slot,))
        self._release_reserved(request)
        if slot is not None:
            self._reserved[request.key] = slot

    def _release_reserved(self, request: Request) -> None:
        if (slot := self._reserved.pop(request.key, None)) is not None:
            self.pool.free((slot,))

    def plan(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> dict[str, StateStep]:
        """Return the states that each request of a step reads and writes, by request. The method must be called exactly
        once for each scheduled step.
        """
        starts = {new.request_id: new.num_computed_tokens for new in output.new_requests}
        cached = output.cached_requests
        starts.update(zip(cached.request_ids, cached.num_computed_tokens, strict=True))
        return {
            key: self._step(requests[key], starts[key], count) for key, count in output.num_scheduled_tokens.items()
        }

    def _step(self, request: Request, start: int, count: int) -> StateStep:
        states = self._requests[request.key]
        base, last = span_start(start), span_start(start + count)
        closed = states.at(base)
        if closed is None:
            raise RuntimeError(f"there is no state of recurrent layers at position {base} of request {request.key!r}")
        if last == base:
            return StateStep(states.rows, closed.block_id)
        writes = [(end, states.shared[end].block_id) for end in self._kept_ends(request, states, base, last)]
        if not writes or writes[-1][0] != last:
            index = 1 - states.own.index(closed) if closed in states.own else int(states.ends[0] == base)
            states.ends[index] = last
            writes.append((last, states.own[index].block_id))
        return StateStep(states.rows, closed.block_id, writes)

    def _kept_ends(self, request: Request, states: _States, base: int, last: int) -> list[int]:
        """Return the positions in ``(base, last]`` whose states the prefix cache keeps. Each of these positions has a
        slot in ``shared``.

        If there are too few slots, the states at the end of the prompt and at the branch get slots first. Later
        requests reuse these states most. If a rejected draft had completed a span with a slot in ``shared``, the step
        that completes the span again writes to the same slot.
        """
        if not self._keeps:
            return []
        interval = self.config.interval
        prompt_end = span_start(request.num_prompt_tokens - 1)
        wanted = [end for end in (prompt_end, states.branch) if base < end <= last]
        wanted += range((base // interval + 1) * interval, last + 1, interval)
        for end in wanted:
            if end not in states.shared and self.num_spare > 0:
                states.shared[end] = self.pool.allocate(1)[0]
        return sorted({end for end in wanted if end in states.shared})

    def settle(self, request: Request, num_processed_tokens: int) -> None:
        """Make the written states findable whose tokens are final. Release the request's references to states that no
        later step reads.
        """
        states = self._requests[request.key]
        base = span_start(num_processed_tokens)
        for end in sorted(states.shared):
            slot = states.shared[end]
            if end <= num_processed_tokens and slot is not self.pool.null_block and slot.block_hash is None:
                self._keep(request, slot, end)
            if end < base:
                self.pool.free([states.shared.pop(end)])

    def _keep(self, request: Request, slot: KVCacheBlock, end: int) -> None:
        """Make the state at position ``end`` findable, unless another slot has the same state or the prefix has no
        hash.
        """
        index = end // SPAN - 1
        if not self._keeps or not 0 <= index < len(request.block_hashes):
            return
        if self.pool.cache(slot, request.block_hashes[index]):
            self._events.kept(KvMedium.STATE, request.block_hashes[index])

    def free(self, request: Request, *, keep: bool) -> None:
        """Release the slots and the ring of a request. If ``keep`` is true, the request's last closed state becomes
        findable.
        """
        self._release_reserved(request)
        states = self._requests.pop(request.key, None)
        if states is None:
            return
        if keep:
            self._keep_last(request, states)
        self.pool.free([*states.shared.values(), *states.own])
        self._free_rows.append(states.rows)

    def keep_last(self, request: Request) -> None:
        """Make the last closed state of a request findable, if the request is running. The caller must end the request
        next.
        """
        if (states := self._requests.get(request.key)) is not None:
            self._keep_last(request, states)

    def _keep_last(self, request: Request, states: _States) -> None:
        base = span_start(request.num_processed_tokens)
        if base in states.ends and base not in states.shared:
            slot = states.own[states.ends.index(base)]
            if slot.block_hash is None:
                self._keep(request, slot, base)

    def forget(self) -> bool:
        """Forget all kept states. If any slot is in use, do nothing and return False."""
        kept = list(self.pool.hashes())
        if not self.pool.forget():
            return False
        for block_hash in kept:
            self._evictions.lost(block_hash)
        return True

    @property
    def in_use(self) -> bool:
        """Whether any slot is in use, because a request owns it or a reference keeps its content."""
        return self.pool.num_free_blocks < self.pool.num_usable_blocks

    # Copies of states to and from other media. See ``BlockHolder``.

    @property
    def num_spare(self) -> int:
        """Number of free slots that are not reserved for requests that can still start."""
        return self.pool.num_free_blocks - SLOTS_PER_REQUEST * len(self._free_rows)

    def hold(self, place: Place) -> bool:
        """See ``BlockHolder``."""
        return self.pool.hold(place.block_id, place.name.hash)

    def release(self, place: Place) -> None:
        """See ``BlockHolder``."""
        self.pool.release(place.block_id)

    def findable(self, medium: KvMedium, name: BlockName, is_there: bool) -> None:
        """See ``BlockHolder``. Routers learn only whether a state is findable on at least one medium."""
        hashes = self._evictions.elsewhere.setdefault(medium, set())
        if is_there:
            hashes.add(name.hash)
            self._events.kept(KvMedium.STATE, name.hash)
        else:
            hashes.discard(name.hash)
            if self.pool.get(name.hash) is None:
                self._evictions.lost(name.hash)

    def lease(self, block_hash: bytes) -> KVCacheBlock | None:
        """Add a reference to a kept state for a lease, and return the state's slot. Return None if the state is not
        kept, or if all free slots are reserved for requests that can still start.
        """
        slot = self.pool.get(block_hash)
        if slot is None or (slot.ref_count == 0 and self.num_spare < 1):
            return None
        self.pool.touch((slot,))
        return slot

    def free_leased(self, slot: KVCacheBlock) -> None:
        """Drop the reference that a lease had to a slot."""
        self.pool.free((slot,))

    def begin_load(self) -> int:
        """Allocate a slot for a state that will be loaded, and return the slot's number. ``num_spare`` must be
        positive.
        """
        return self.pool.allocate(1)[0].block_id

    def arrived(self, slot: int, block_hash: bytes) -> None:
        """Make a state that was loaded into ``slot`` findable."""
        if self.pool.cache(self.pool.blocks[slot], block_hash):
            self._events.kept(KvMedium.STATE, block_hash)

    def free_loaded(self, slot: int) -> None:
        """Drop the reference that a load had to its slot."""
        self.pool.free((self.pool.blocks[slot],))

    def stats(self) -> StateStats:
        """Return statistics of the use of the state pool. Thread-safe."""
        pool = self.pool
        return StateStats(
            num_slots=pool.num_usable_blocks,
            num_used_slots=pool.num_usable_blocks - pool.num_free_blocks,
            num_kept=len(pool.hashes()),
            num_evictions=self._evictions.count,
            num_recomputed_tokens=self._num_recomputed_tokens,
            max_running_reqs=self.config.num_requests,
        )
