"""Mapping of requests to KV cache blocks, and reuse of cached prefixes.

The design is vLLM's automatic prefix caching: the hash of a prefix identifies the last block of that prefix.
"""

from collections.abc import Collection, Iterable, Sequence

import msgspec

from penstock_common.block_hash import BlockHasher
from penstock_common.types.kv_transfer import STATE_GROUP, BlockName, KvCacheEvent, KvMedium
from penstock_enginecore.core.kv_cache.block_pool import BlockPool, ComputedBlocks, KVCacheBlock, find_computed_blocks
from penstock_enginecore.core.kv_cache.events import KvEventLog
from penstock_enginecore.core.kv_cache.sizing import num_blocks_for
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup
from penstock_enginecore.core.request import Request, RequestStatus, span_around
from penstock_enginecore.kv_transfer.core.base import Place
from penstock_enginecore.kv_transfer.core.plan import LoadPlan, Lookup, plan_load
from penstock_enginecore.states.core.slots import StateSlots


class PrefixCacheStats(msgspec.Struct):
    """Number of tokens that were looked up in the prefix cache, and number of these tokens that were found, since the
    engine started.
    """

    queries: int = 0
    hits: int = 0


class KVCacheManager:
    """Allocates blocks to requests.

    A request has one block table per KV cache group. All tables of a request have the same length: block i of each
    table is for the same tokens. In groups with an attention window, later queries no longer attend to the first blocks
    of a sequence. ``free_out_of_window`` frees these blocks and replaces them with the null block. ``has_windows`` says
    whether the model has such groups. A group that stores only some positions has the null block for the other
    positions.

    Only full blocks with final, computed tokens become findable by hash. Therefore the caller must call
    ``cache_blocks`` after a step, and then ``free_out_of_window``.

    If every token of a request is cached, the last token is recomputed, because its logits are needed. The step writes
    the token's keys and values to the last block, which other requests may share. All requests that share the block
    have the same prefix, so the values are equal up to floating-point rounding. Recomputing one token is cheaper than
    recomputing a block.
    """

    def __init__(self, config: KVCacheConfig, *, enable_prefix_caching: bool, enable_kv_events: bool = False) -> None:
        self.block_size = config.block_size
        self.groups = groups = config.groups
        self._windows = [(number, group) for number, group in enumerate(groups) if group.is_windowed]
        self.has_windows = bool(self._windows)
        full = [number for number, group in enumerate(groups) if not group.is_windowed and not group.first_block]
        self._events = KvEventLog(config.block_size, group=full[0] if full else 0, in_full=enable_kv_events)
        self.pool = BlockPool(config.num_blocks, len(groups), self._events)
        self.prefix_stats = PrefixCacheStats()
        self.external_stats = PrefixCacheStats()
        """Statistics of lookups with the KV connector, if one is configured. The connector looks up only tokens that
        were not in the block pool.
        """
        self.reuses = enable_prefix_caching
        """Whether prefix caching is enabled."""
        self.states = (
            None
            if config.states is None
            else StateSlots(config.states, keeps=enable_prefix_caching, events=self._events)
        )
        """Device memory slots for states of recurrent layers, or None for a model without recurrent layers."""
        self._hasher = BlockHasher(config.block_size)
        self._nothing_computed = ComputedBlocks(tuple([] for _ in groups))
        self._blocks: dict[str, tuple[list[KVCacheBlock], ...]] = {}
        self._num_cached: dict[str, int] = {}
        self._num_left: dict[str, list[int]] = {}
        """Number of the request's blocks that are outside the attention window, for each group with a window, by
        request key.
        """

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the maximum number of blocks, over all groups, that a request of ``num_tokens`` tokens uses at the
        same time.
        """
        return num_blocks_for(self.groups, -(-num_tokens // self.block_size))

    def hash_prompt(self, request: Request) -> None:
        """Compute the hashes of the request's full blocks before scheduling. Thread-safe, because only the request is
        changed.
        """
        if self.reuses:
            self._hasher.extend(request, request.num_tokens)

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """Return the longest prefix of the request that is cached in every group. If the model has recurrent states,
        the state at the end of the prefix must also be kept. The prefix never includes the last token, because the last
        token must be computed.
        """
        if not self.reuses or request.skip_reading_prefix_cache:
            return self._nothing_computed
        self._hasher.extend(request, request.num_tokens)
        hashes = request.block_hashes
        # The last token is always computed, so the state to start from must not include the last token.
        if self.states is not None:
            hashes = hashes[: (request.num_tokens - 1) // self.block_size]
        computed = self._find(request, hashes)
        if self.states is None:
            return computed
        keys = computed.num_tokens
        while (kept := self.states.longest(hashes, computed.num_blocks)) < computed.num_blocks:
            computed = self._find(request, hashes[:kept])
        return msgspec.structs.replace(computed, branch=keys) if computed.num_tokens < keys else computed

    def _find(self, request: Request, hashes: Sequence[bytes]) -> ComputedBlocks:
        """Return the longest prefix of ``hashes`` that is cached in every group and splits no span of tokens that must
        be computed together.
        """
        computed = find_computed_blocks(self.pool, self.groups, hashes, self.block_size, request.num_tokens)
        while request.whole_spans and (span := span_around(request.whole_spans, computed.num_tokens)) is not None:
            hashes = hashes[: span[0] // self.block_size]
            computed = find_computed_blocks(self.pool, self.groups, hashes, self.block_size, request.num_tokens)
        return computed

    def allocate_slots(
        self, request: Request, num_new_tokens: int, *, reserve: int = 0
    ) -> tuple[list[int], ...] | None:
        """Allocate blocks for the next ``num_new_tokens`` tokens of a running request.

        Returns:
            The ids of the new blocks, one list per group. An empty tuple if no new block was needed, as in most steps.
            None if there are too few free blocks, or if fewer than ``reserve`` blocks for each group would stay free
            afterwards.
        """
        tables = self._blocks[request.key]
        num_blocks, end = len(tables[0]), -(-(request.num_computed_tokens + num_new_tokens) // self.block_size)
        if end <= num_blocks:
            return ()
        if self._num_new(num_blocks, end) + reserve * len(tables) > self.pool.num_free_blocks:
            return None
        return tuple([self._extend(table, group, end) for table, group in zip(tables, self.groups, strict=True)])

    def num_allocated_tokens(self, request: Request) -> int:
        """Return the number of tokens for which a running request has blocks."""
        return len(self._blocks[request.key][0]) * self.block_size

    def _num_new(self, start: int, end: int) -> int:
        """Return the number of blocks, over all groups, for the indices ``start`` to ``end`` of block tables."""
        return sum(len(group.indices(start, end)) for group in self.groups)

    def _extend(self, table: list[KVCacheBlock], group: KVCacheGroup, end: int) -> list[int]:
        """Extend the block table of a group to ``end`` blocks, and return the ids of the new blocks."""
        start, stored, null = len(table), group.indices(len(table), end), self.pool.null_block
        new = self.pool.allocate(len(stored))
        if len(new) < end - start:
            before = min(stored.start, end) - start
            new = [null] * before + new
            new += [null] * (end - start - len(new))
        table.extend(new)
        return [block.block_id for block in new]

    def admit(self, request: Request, computed: ComputedBlocks, num_new_tokens: int, *, reserve: int) -> bool:
        """Give a waiting request the cached blocks of its prefix, and blocks for ``num_new_tokens`` more tokens. Blocks
        that the request had before are freed.

        If fewer than ``reserve`` blocks would stay free, or if the request cannot get slots for recurrent states, do
        nothing and return False.
        """
        pool = self.pool
        end = -(-(computed.num_tokens + num_new_tokens) // self.block_size)
        revived = pool.num_free_among(computed.blocks)
        if self._num_new(computed.num_blocks, end) + revived + reserve > pool.num_free_blocks:
            return False
        if self.states is not None and not self.states.admit(request, computed.num_tokens, computed.branch):
            return False
        self._hold_blocks(request, computed.blocks)
        self._blocks[request.key] = tables = tuple([[*blocks] for blocks in computed.blocks])
        for table, group in zip(tables, self.groups, strict=True):
            self._extend(table, group, end)
        self._num_cached[request.key] = computed.num_blocks
        if self.has_windows:
            self._num_left[request.key] = [0] * len(self._windows)
        if request.num_preemptions == 0 and self.reuses:
            self.prefix_stats.queries += request.num_tokens
            self.prefix_stats.hits += computed.num_tokens - request.num_loaded_tokens
        return True

    def hold(self, request: Request, tables: tuple[list[KVCacheBlock], ...], num_blocks: int) -> None:
        """Reserve cached blocks for a request that has not started. If a recurrent state is kept at the end of the
        first ``num_blocks`` blocks, also reserve that state. Blocks and the state that the request had before are
        freed.
        """
        self._hold_blocks(request, tables)
        if self.states is not None:
            self.states.reserve(request, num_blocks * self.block_size)

    def _hold_blocks(self, request: Request, tables: tuple[list[KVCacheBlock], ...]) -> None:
        for blocks in tables:
            self.pool.touch(blocks)
        for table in self._blocks.pop(request.key, ()):
            self.pool.free(table)
        self._blocks[request.key] = tables

    def plan_load(self, request: Request, lookup: Lookup) -> LoadPlan:
        """Return the blocks of the request's prefix that should be loaded, as ``kv_transfer.core.plan.plan_load``
        chooses them. If the model has recurrent states, the prefix ends at a state that is kept or can be loaded. The
        prefix never ends inside a span of tokens that must be computed together.
        """
        states, hashes = self.states, request.block_hashes
        if states is None:
            return self._plan_load(request, hashes, lookup)
        # The last token is always computed, see get_computed_blocks.
        hashes = hashes[: (request.num_tokens - 1) // self.block_size]
        plan = self._plan_load(request, hashes, lookup)
        while (kept := states.longest(hashes, plan.num_blocks, lookup)) < plan.num_blocks:
            plan = self._plan_load(request, hashes[:kept], lookup)
        return plan._replace(state=states.missing(hashes, plan.num_blocks))

    def _plan_load(self, request: Request, hashes: Sequence[bytes], lookup: Lookup) -> LoadPlan:
        size = self.block_size
        plan = plan_load(self.pool, self.groups, hashes, size, request.num_tokens, lookup)
        while request.whole_spans and (span := span_around(request.whole_spans, plan.num_blocks * size)) is not None:
            hashes = hashes[: span[0] // size]
            plan = plan_load(self.pool, self.groups, hashes, size, request.num_tokens, lookup)
        return plan

    def arrived(self, request: Request, places: Iterable[Place]) -> None:
        """Make the blocks and the recurrent state that were loaded for the request findable by later requests."""
        index = {block_hash: i for i, block_hash in enumerate(request.block_hashes)}
        stored = []
        for name, block_id in places:
            if name.group == STATE_GROUP:
                self._states_of(name).arrived(block_id, name.hash)
            elif (
                self.pool.cache(self.pool.blocks[block_id], name.hash, name.group) and name.group == self._events.group
            ):
                stored.append(index[name.hash])
        self._events.stored(request, sorted(stored))

    def _states_of(self, name: BlockName) -> StateSlots:
        if self.states is None:
            raise RuntimeError(f"{name} names a state of recurrent layers, but the model has no recurrent layers")
        return self.states

    def free_loaded(self, places: Iterable[Place]) -> None:
        """Drop the references that a load had to the blocks and state slots to which the load wrote."""
        blocks = []
        for name, block_id in places:
            if name.group == STATE_GROUP:
                self._states_of(name).free_loaded(block_id)
            else:
                blocks.append(self.pool.blocks[block_id])
        self.pool.free(blocks)

    def block_ids(self, request: Request) -> tuple[list[int], ...]:
        """Return the request's block table in each group. Id 0 is the null block."""
        return tuple([[block.block_id for block in table] for table in self._blocks[request.key]])

    def cache_blocks(self, request: Request) -> None:
        """Make the full blocks and the written recurrent states of processed tokens findable. Release states that the
        request no longer reads.
        """
        if not self.reuses:
            if self.states is not None:
                self.states.settle(request, request.num_processed_tokens)
            return
        first = self._num_cached[request.key]
        full = request.num_processed_tokens // self.block_size
        if full <= first:
            return
        self._hasher.extend(request, full * self.block_size)
        hashes, pool, events = request.block_hashes, self.pool, self._events
        for group, table in enumerate(self._blocks[request.key]):
            stored = [
                index
                for index in range(first, full)
                if table[index] is not pool.null_block and pool.cache(table[index], hashes[index], group)
            ]
            if group == events.group:
                events.stored(request, stored)
        self._num_cached[request.key] = full
        if self.states is not None:
            self.states.settle(request, request.num_processed_tokens)

    def free_out_of_window(self, request: Request, num_processed_tokens: int) -> None:
        """Free the blocks to which no query at position ``num_processed_tokens`` or later attends.

        Freeing these blocks is safe once every step that computes an earlier position has been launched. A device runs
        its steps in order, so the launched steps read the blocks before a later step overwrites them. The caller passes
        the number of tokens in processed steps, not in launched steps. Computed blocks are then already findable, and
        rejected drafts do not count. Workers keep the ids of freed blocks in their block tables, but attention never
        reads outside a window.
        """
        left = self._num_left[request.key]
        tables = self._blocks[request.key]
        for i, (number, group) in enumerate(self._windows):
            first = group.first_key(num_processed_tokens) // self.block_size
            if first > left[i]:
                table = tables[number]
                blocks = table[left[i] : first]
                table[left[i] : left[i] + len(blocks)] = [self.pool.null_block] * len(blocks)
                left[i] += len(blocks)
                self.pool.free(blocks)

    def free(self, request: Request) -> None:
        """Free all blocks and recurrent states of a request. The content of full blocks and kept states stays findable
        until their memory is reused. The last state of a request that failed is forgotten, because its numbers may be
        wrong.
        """
        if self.states is not None:
            self.states.free(request, keep=self.reuses and request.status is not RequestStatus.FINISHED_ERROR)
        self._num_cached.pop(request.key, None)
        self._num_left.pop(request.key, None)
        for table in self._blocks.pop(request.key, ()):
            self.pool.free(table)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes and kept recurrent states. If any block or state is in use, do nothing and return
        False.
        """
        if self.states is None:
            return self.pool.forget()
        return not self.states.in_use and self.pool.forget() and self.states.forget()

    def record_events(self, on: bool) -> None:
        """Start or stop recording changes of the prefix cache. If ``enable_kv_events`` is true, changes are always
        recorded.
        """
        self._events.record(on)

    def take_events(self) -> list[KvCacheEvent]:
        """Return the recorded changes of the prefix cache since the last call, in order."""
        return self._events.take()

    def findable(self, medium: KvMedium, name: BlockName, is_there: bool) -> None:
        """Record that a block in a medium outside the pool, such as host memory, became findable or was lost."""
        if name.group == self._events.group:
            (self._events.kept if is_there else self._events.lost)(medium, name.hash)

    def cached_blocks(self, part: int, num_parts: int, medium: KvMedium = KvMedium.DEVICE) -> list[bytes]:
        """Return the hashes of the findable blocks of a medium, such as the device or host memory. The hashes are the
        same as in the events.

        One call returns only part number ``part`` of ``num_parts`` parts of similar size, counted from 0. A block is
        always in the same part.
        """
        hashes = self._findable_in(medium)
        if num_parts == 1:
            return list(hashes)
        return [block_hash for block_hash in hashes if int.from_bytes(block_hash[:4], "big") % num_parts == part]

    def num_cached_blocks(self, medium: KvMedium) -> int:
        """Return the number of findable blocks of a medium, such as the device or host memory."""
        return len(self._findable_in(medium))

    def _findable_in(self, medium: KvMedium) -> Collection[bytes]:
        return self.pool.hashes(self._events.group) if medium is KvMedium.DEVICE else self._events.kept_in(medium)
