"""Random lives of requests over groups of layers.

Every key that a later query reads is in the block that the tables name. No block is lost, and the events list exactly
the blocks that can be found.
"""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock_common.types.kv_transfer import AllBlocksCleared, BlockRemoved, BlockStored
from penstock_enginecore.core.kv_cache.manager import KVCacheManager
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup
from penstock_enginecore.core.request import Request
from tests.fakes.engines.engine_harness import make_request
from tests.fakes.engines.engine_lives import LIVES

MAX_LEN = 40
MAX_STEP = 12
WINDOWS = st.builds(
    KVCacheGroup,
    layer_names=st.just(("layer",)),
    sliding_window=st.sampled_from([None, None, 1, 2, 5, 9]),
    attention_chunk=st.sampled_from([None, None, None, 1, 6, 8]),
)
PARTS = st.builds(
    KVCacheGroup,
    layer_names=st.just(("layer",)),
    first_block=st.sampled_from([0, 0, 1, 3]),
    end_block=st.sampled_from([None, 1, 2, 5]),
)
"""Groups that store only some positions."""
GROUPS = st.one_of(WINDOWS, WINDOWS, PARTS)


class GroupsMachine(RuleBasedStateMachine):
    """A manager, and the memory that requests write to: ``written`` maps a slot to its group and the prefix it ends."""

    @initialize(
        groups=st.lists(GROUPS, min_size=1, max_size=3),
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(3, 60),
        in_full=st.booleans(),
    )
    def begin(self, groups, block_size, num_blocks, in_full):
        config = KVCacheConfig(
            num_blocks=num_blocks, block_size=block_size, groups=tuple(groups), max_model_len=MAX_LEN
        )
        self.groups = groups
        self.block_size = block_size
        self.manager = KVCacheManager(config, enable_prefix_caching=True, enable_kv_events=in_full)
        self.manager.record_events(True)
        self.in_full = in_full
        self.nobody_follows = False
        self.requests = []
        self.written = {}
        self.followed = set()

    @rule(length=st.integers(1, 24), family=st.integers(0, 1), tail=st.integers(0, 2), count=st.integers(1, MAX_STEP))
    def admit(self, length, family, tail, count):
        prompt = [family] * length + [9] * tail
        request = Request(make_request(prompt), client_id="c", max_model_len=MAX_LEN)
        computed = self.manager.get_computed_blocks(request)
        self.check_hit(request, computed)
        count = min(count, request.num_tokens - computed.num_tokens)
        before = self.manager.pool.num_free_blocks
        if not self.manager.admit(request, computed, count, reserve=0):
            assert self.manager.pool.num_free_blocks == before
            return
        self.requests.append(request)
        request.num_computed_tokens = request.num_processed_tokens = computed.num_tokens
        self.compute(request, count, lag=0)

    def check_hit(self, request, computed):
        """Check that the hit is valid, and that no longer prefix would be."""
        for length in range(len(request.block_hashes), -1, -1):
            num_tokens = min(length * self.block_size, request.num_tokens - 1)
            if all(self.has(request, number, length, num_tokens) for number in range(len(self.groups))):
                assert computed.num_tokens == num_tokens
                assert [len(table) for table in computed.blocks] == [length] * len(self.groups)
                break
        request.num_computed_tokens = request.num_processed_tokens = computed.num_tokens
        tables = [[block.block_id for block in table] for table in computed.blocks]
        self.check_keys(request, tables)
        if computed.num_tokens < computed.num_blocks * self.block_size:
            last = computed.num_blocks - 1
            for table, group in zip(tables, self.groups, strict=True):
                assert bool(table[-1]) is (last in group.indices(0, last + 1))  # the last token is written again

    def has(self, request, number, length, num_tokens):
        first = self.groups[number].first_key(num_tokens) // self.block_size
        needed = self.groups[number].indices(first, length)
        return all(self.manager.pool.get(request.block_hashes[index], number) for index in needed)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(1, MAX_STEP), lag=st.integers(0, MAX_STEP))
    def advance(self, data, count, lag):
        request = data.draw(st.sampled_from(self.requests))
        if request.num_computed_tokens == request.num_tokens:
            request.all_token_ids.append(data.draw(st.integers(0, 1)))
        count = min(count, request.num_tokens - request.num_computed_tokens)
        held = self.manager.block_ids(request)
        free = self.manager.pool.num_free_blocks
        new = self.manager.allocate_slots(request, count)
        if new is None:
            assert free < len(self.groups) * -(-(count + self.block_size) // self.block_size)
            assert self.manager.block_ids(request) == held
            self.end(request)
            return
        added = new or [[] for _ in held]
        assert [[*old, *ids] for old, ids in zip(held, added, strict=True)] == list(self.manager.block_ids(request))
        self.compute(request, count, lag)

    def compute(self, request, count, lag):
        """A step: its queries read what they see, and its keys are written. ``lag``: tokens not yet processed."""
        tables = self.manager.block_ids(request)
        self.check_keys(request, tables)
        end = request.num_computed_tokens + count
        for number, table in enumerate(tables):
            for position in range(request.num_computed_tokens, end):
                block_id = table[position // self.block_size]
                assert bool(block_id) is self.stores(number, position)
                if not block_id:
                    continue
                self.written[block_id, position % self.block_size] = (
                    number,
                    tuple(request.all_token_ids[: position + 1]),
                )
        request.num_computed_tokens = request.num_processed_tokens = end
        self.manager.cache_blocks(request)
        if self.manager.has_windows:
            self.manager.free_out_of_window(request, max(end - lag, 0))

    def stores(self, number, position):
        """Whether a group stores the keys of a position."""
        index = position // self.block_size
        return index in self.groups[number].indices(0, index + 1)

    def check_keys(self, request, tables):
        """Every key that the group stores and the next query sees is there."""
        for number, group in enumerate(self.groups):
            for position in range(group.first_key(request.num_computed_tokens), request.num_computed_tokens):
                if not self.stores(number, position):
                    assert tables[number][position // self.block_size] == 0
                    continue
                slot = tables[number][position // self.block_size], position % self.block_size
                assert self.written[slot] == (number, tuple(request.all_token_ids[: position + 1]))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data):
        self.end(data.draw(st.sampled_from(self.requests)))

    def end(self, request):
        self.requests.remove(request)
        self.manager.free(request)

    @rule()
    def reset(self):
        assert self.manager.reset_prefix_cache() == (self.manager.pool.usage == 0)

    @invariant()
    def every_block_is_free_or_held_as_often_as_counted(self):
        if not hasattr(self, "manager"):
            return
        held = Counter()
        owners = {}
        for request in self.requests:
            for number, table in enumerate(self.manager.block_ids(request)):
                for place, block_id in enumerate(table):
                    if block_id:
                        held[block_id] += 1
                        prefix = tuple(request.all_token_ids[: (place + 1) * self.block_size])
                        assert owners.setdefault(block_id, (number, place, prefix)) == (number, place, prefix)
        assert {b.block_id: b.ref_count for b in self.manager.pool.blocks if b.ref_count} == held
        assert self.manager.pool.num_free_blocks == self.manager.pool.num_usable_blocks - len(held)

    @invariant()
    def windows_hold_no_more_than_they_can(self):
        if not hasattr(self, "manager"):
            return
        for request in self.requests:
            for group, table in zip(self.groups, self.manager.block_ids(request), strict=True):
                spans = [s for s in (group.sliding_window, group.attention_chunk) if s is not None]
                if spans:
                    most = -(-(min(spans) - 1 + 2 * MAX_STEP) // self.block_size) + 1
                    assert sum(block_id != 0 for block_id in table) <= most

    @invariant()
    def events_tell_what_can_be_found(self):
        if not hasattr(self, "manager"):
            return
        events = self.manager.take_events()
        if self.nobody_follows:
            assert events == []
            return
        for event in events:
            if isinstance(event, BlockStored):
                assert not self.followed & set(event.block_hashes)
                num_told = len(event.block_hashes) if self.in_full else 0
                assert len(event.token_ids) == num_told * event.block_size
                self.followed |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                assert set(event.block_hashes) <= self.followed
                self.followed -= set(event.block_hashes)
            else:
                assert isinstance(event, AllBlocksCleared)
                self.followed.clear()
        whole = [number for number, group in enumerate(self.groups) if not group.is_windowed and not group.first_block]
        told = next(iter(whole), 0)
        assert self.followed == set(self.manager.pool._by_hash[told])

    @rule()
    def the_last_follower_leaves(self):
        self.manager.record_events(False)
        self.nobody_follows = not self.in_full

    @precondition(lambda self: getattr(self, "nobody_follows", False))
    @rule()
    def one_comes_and_asks(self):
        self.manager.record_events(True)
        self.nobody_follows = False
        self.followed = set(self.manager.cached_blocks(0, 1))

    def teardown(self):
        if hasattr(self, "manager"):
            for request in self.requests:
                self.manager.free(request)
            assert self.manager.pool.num_free_blocks == self.manager.pool.num_usable_blocks


GroupsMachine.TestCase.settings = LIVES
TestRandomLivesOfGroups = GroupsMachine.TestCase


@pytest.mark.slow
class TestManyRandomLivesOfGroups(GroupsMachine.TestCase):
    """Runs more examples, different ones each time."""

    settings = settings(TestRandomLivesOfGroups.settings, max_examples=600, derandomize=False)
