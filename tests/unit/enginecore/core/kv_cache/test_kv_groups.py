"""Several groups of layers over one pool: windows, common prefixes of all groups, and the events routers follow."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock_common.types.kv_transfer import AllBlocksCleared, BlockRemoved, BlockStored
from penstock_enginecore.core.kv_cache.block_pool import BlockPool, find_computed_blocks
from penstock_enginecore.core.kv_cache.manager import KVCacheManager
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup
from penstock_enginecore.core.request import Request
from tests.fakes.engines.engine_harness import make_request

FULL = KVCacheGroup(layer_names=("full",))


def window(size, max_blocks=None):
    return KVCacheGroup(layer_names=(f"window{size}",), sliding_window=size, max_blocks=max_blocks)


def chunk(size):
    return KVCacheGroup(layer_names=(f"chunk{size}",), attention_chunk=size)


def make_manager(*groups, num_blocks=64, events=False):
    config = KVCacheConfig(num_blocks=num_blocks, block_size=4, groups=groups, max_model_len=1000)
    return KVCacheManager(config, enable_prefix_caching=True, enable_kv_events=events)


def make(tokens, **fields):
    return Request(make_request(list(tokens), **fields), client_id="c", max_model_len=1000)


def start(manager, tokens):
    """Admit a request and compute its first chunk: everything that is not cached."""
    request = make(tokens)
    computed = manager.get_computed_blocks(request)
    request.num_computed_tokens = request.num_processed_tokens = computed.num_tokens
    assert manager.admit(request, computed, request.num_tokens - computed.num_tokens, reserve=0)
    process(manager, request, request.num_tokens)
    return request


def process(manager, request, num_computed):
    request.num_computed_tokens = request.num_processed_tokens = num_computed
    manager.cache_blocks(request)
    if manager.has_windows:
        manager.free_out_of_window(request, num_computed)


def decode(manager, request, count):
    for _ in range(count):
        request.all_token_ids.append(7)
        assert manager.allocate_slots(request, 1) is not None
        process(manager, request, request.num_computed_tokens + 1)


def used(manager):
    return manager.pool.num_usable_blocks - manager.pool.num_free_blocks


def hit(manager, tokens):
    return manager.get_computed_blocks(make(tokens))


def evict(manager, block):
    """Take a free block out of the cache, by handing out all free ones."""
    assert block.ref_count == 0
    taken = manager.pool.allocate(manager.pool.num_free_blocks)
    assert block in taken
    manager.pool.free(taken)


# Groups with sliding windows.


@pytest.mark.parametrize(
    ("group", "seen"),
    [
        (FULL, [0, 0, 0, 0]),
        (window(1), [0, 3, 4, 9]),
        (window(4), [0, 0, 1, 6]),
        (chunk(4), [0, 0, 4, 8]),
    ],
)
def test_the_first_key_a_query_sees(group, seen):
    assert [group.first_key(position) for position in (0, 3, 4, 9)] == seen


def test_a_group_each_has_blocks_of_its_own():
    manager = make_manager(FULL, window(100))
    request = start(manager, range(10))
    tables = manager.block_ids(request)
    assert [len(table) for table in tables] == [3, 3]
    assert len({block_id for table in tables for block_id in table}) == 6


def test_blocks_that_left_the_window_are_null_and_go_back_to_the_pool():
    manager = make_manager(FULL, window(5))
    request = start(manager, range(14))
    full, windowed = manager.block_ids(request)
    # The next query, at position 14, attends to positions 10 to 14, which are in blocks 2 and 3.
    assert windowed[:2] == [0, 0]
    assert 0 not in [*full, *windowed[2:]]
    assert used(manager) == 4 + 2


def test_chunked_attention_gives_back_whole_chunks():
    manager = make_manager(chunk(8))
    request = start(manager, range(15))
    assert used(manager) == 2
    decode(manager, request, 1)  # the next query, at 16, starts a chunk
    assert used(manager) == 0
    decode(manager, request, 1)
    assert used(manager) == 1


@pytest.mark.parametrize("size", [1, 4, 5, 8, 13])
def test_a_long_output_holds_no_more_than_its_window(size):
    manager = make_manager(window(size), num_blocks=8)
    request = start(manager, range(3))
    most = 0
    for _ in range(100):
        decode(manager, request, 1)
        most = max(most, used(manager))
    assert most <= -(-size // 4) + 1
    manager.free(request)
    assert used(manager) == 0


def test_nothing_is_freed_that_an_unprocessed_step_may_still_need():
    manager = make_manager(window(4))
    request = start(manager, range(8))
    before = used(manager)
    request.all_token_ids += [7] * 4
    assert manager.allocate_slots(request, 4) is not None
    request.num_computed_tokens = request.num_processed_tokens = 12
    manager.free_out_of_window(request, 8)  # the step that computes positions 8 to 11 is in flight
    assert used(manager) == before + 1
    manager.free_out_of_window(request, 12)
    assert used(manager) == 1


def test_slots_are_counted_over_all_groups():
    manager = make_manager(FULL, window(8), num_blocks=6)
    request = start(manager, range(8))
    assert manager.allocate_slots(request, 1) is None  # one block is free, two are needed
    assert used(manager) == 4


def test_admission_counts_all_groups_and_the_reserve():
    manager = make_manager(FULL, window(8), num_blocks=6)
    request = make(range(8))
    nothing = manager.get_computed_blocks(request)
    assert not manager.admit(request, nothing, 8, reserve=2)
    assert used(manager) == 0
    assert manager.admit(request, nothing, 8, reserve=1)


def test_the_need_of_a_long_sequence_counts_windows_once():
    manager = make_manager(FULL, window(8, max_blocks=3))
    assert [manager.num_blocks_for(n) for n in (1, 8, 12, 400)] == [2, 4, 6, 103]


# Prefix cache hits.


def test_a_hit_gives_windows_their_last_blocks_and_null_before():
    manager = make_manager(FULL, window(5))
    manager.free(start(manager, range(16)))
    computed = hit(manager, [*range(16), 50])
    assert computed.num_tokens == 16
    full, windowed = ([block.block_id for block in table] for table in computed.blocks)
    assert 0 not in full
    assert windowed[:3] == [0, 0, 0]
    assert windowed[3] != 0


def test_a_full_hit_needs_the_window_of_the_last_token():
    manager = make_manager(window(2))
    manager.free(start(manager, range(8)))
    # The query at position 7 is recomputed and attends to position 6, and a query at 8 would also attend to 7. Both
    # need block 1.
    assert [block.block_id != 0 for block in hit(manager, range(8)).blocks[0]] == [False, True]
    assert hit(manager, range(8)).num_tokens == 7


def test_a_full_hit_has_a_block_for_the_last_token_even_if_no_other_key_is_visible():
    manager = make_manager(window(1), chunk(4))
    manager.free(start(manager, range(8)))
    for table in hit(manager, range(8)).blocks:
        assert [block.block_id != 0 for block in table] == [False, True]
    for table in hit(manager, range(9)).blocks:
        assert [block.block_id for block in table] == [0, 0]


def test_what_a_window_lacks_shortens_the_prefix_to_where_all_groups_have_it():
    manager = make_manager(FULL, window(5))
    request = start(manager, range(16))
    last = manager._blocks[request.key][1][3]
    manager.free(request)
    keep = [block for block in manager.pool.blocks[1:] if block is not last and block.block_hash is not None]
    manager.pool.touch(keep)
    evict(manager, last)
    manager.pool.free(keep)
    assert hit(manager, range(17)).num_tokens == 12


def test_what_full_attention_lacks_may_leave_windows_nothing_to_start_from():
    manager = make_manager(FULL, window(5))
    request = start(manager, range(16))
    full = manager._blocks[request.key][0][2]
    gone = manager.pool.get(request.block_hashes[1], 1)
    manager.free(request)
    keep = [b for b in manager.pool.blocks[1:] if b not in (full, gone) and b.block_hash is not None]
    manager.pool.touch(keep)
    evict(manager, full)
    manager.pool.free(keep)
    # The full group still has eight tokens. The window before position 8 is evicted, and the window before 4 is cached.
    assert hit(manager, range(17)).num_tokens == 4


@settings(max_examples=400)
@given(
    groups=st.lists(
        st.sampled_from([FULL, window(1), window(5), window(9), chunk(6), chunk(8)]), min_size=1, max_size=4
    ),
    missing=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 7)), max_size=16),
    tail=st.integers(0, 3),
)
# The second window has no hit after eight blocks, and then the first window has no hit after seven blocks.
@example(groups=[window(5), window(9)], missing={(0, 6), (1, 7)}, tail=1)
def test_a_hit_is_the_longest_prefix_that_every_group_can_start_from(groups, missing, tail):
    num_tokens = 8 * 4 + tail
    hashes = [bytes([index]) for index in range(8)]
    pool = BlockPool(len(groups) * 8 + 1, len(groups))
    for number in range(len(groups)):
        for index in range(8):
            if (number, index) not in missing:
                pool.cache(pool.allocate(1)[0], hashes[index], number)

    def can_start(group, number, length):
        first = group.first_key(min(length * 4, num_tokens - 1)) // 4
        return all((number, index) not in missing for index in range(first, length))

    longest = max(
        length for length in range(9) if all(can_start(group, number, length) for number, group in enumerate(groups))
    )
    computed = find_computed_blocks(pool, groups, hashes, 4, num_tokens)
    assert computed.num_blocks == longest
    assert computed.num_tokens == min(longest * 4, num_tokens - 1)
    assert [len(table) for table in computed.blocks] == [longest] * len(groups)


def test_equal_prefixes_share_blocks_in_each_group():
    manager = make_manager(FULL, window(9))
    first, second = start(manager, range(12)), start(manager, [*range(12), 1])
    for mine, other in zip(manager.block_ids(first), manager.block_ids(second), strict=True):
        assert mine == other[:3]


def test_sharing_a_window_outlives_the_one_that_left_it():
    manager = make_manager(FULL, window(6))
    first = start(manager, range(12))
    second = start(manager, [*range(12), 1])
    before = manager.block_ids(second)
    decode(manager, first, 20)
    assert manager.block_ids(second) == before
    assert all(manager.pool.blocks[i].ref_count for i in before[1] if i)


def test_reset_forgets_all_groups():
    manager = make_manager(FULL, window(6))
    request = start(manager, range(12))
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert hit(manager, range(12)).num_tokens == 0


# KV cache events.


def test_blocks_that_become_findable_together_are_one_event():
    manager = make_manager(FULL, window(6), events=True)
    request = start(manager, range(10))
    hashes = request.block_hashes
    assert manager.take_events() == [
        BlockStored(block_hashes=hashes[:2], parent_hash=b"", token_ids=list(range(8)), block_size=4)
    ]
    decode(manager, request, 2)
    assert manager.take_events() == [
        BlockStored(block_hashes=hashes[2:3], parent_hash=hashes[1], token_ids=[8, 9, 7, 7], block_size=4)
    ]
    assert manager.take_events() == []


def test_blocks_that_are_findable_already_are_not_told_again():
    manager = make_manager(FULL, events=True)
    start(manager, range(8))
    manager.take_events()
    salted = make(range(12), skip_reading_prefix_cache=True)
    assert manager.admit(salted, manager.get_computed_blocks(salted), 12, reserve=0)
    process(manager, salted, 12)
    [event] = manager.take_events()
    assert event.block_hashes == salted.block_hashes[2:]
    assert event.parent_hash == salted.block_hashes[1]


def test_evicted_blocks_are_told_for_the_group_that_stands_for_all():
    manager = make_manager(window(6), FULL, num_blocks=7, events=True)
    request = start(manager, range(12))
    manager.free(request)
    manager.take_events()
    manager.pool.allocate(6)
    [event] = manager.take_events()
    assert isinstance(event, BlockRemoved)
    assert sorted(event.block_hashes) == sorted(request.block_hashes)


def test_a_reset_clears_what_was_not_told_yet():
    manager = make_manager(FULL, events=True)
    manager.free(start(manager, range(8)))
    assert manager.reset_prefix_cache()
    assert manager.take_events() == [AllBlocksCleared()]


def test_events_are_off_unless_asked_for():
    manager = make_manager(FULL)
    start(manager, range(8))
    assert manager.take_events() == []


# Groups that store only some positions, as the two kinds of attention of Whisper's decoder.

SOUND = KVCacheGroup(layer_names=("cross",), end_block=3)
TEXT = KVCacheGroup(layer_names=("own",), first_block=3)


def test_each_group_has_blocks_only_where_it_stores_keys():
    manager = make_manager(SOUND, TEXT)
    request = start(manager, range(18))
    sound, text = manager.block_ids(request)
    assert [bool(block_id) for block_id in sound] == [True] * 3 + [False] * 2
    assert [bool(block_id) for block_id in text] == [False] * 3 + [True] * 2
    assert used(manager) == 5
    decode(manager, request, 20)
    assert used(manager) == 3 + 7
    assert manager.num_blocks_for(38) == 3 + 7
    manager.free(request)
    assert used(manager) == 0


@pytest.mark.parametrize("num_new", [1, 4, 11, 12, 13, 30])
def test_a_request_starts_if_the_blocks_that_it_uses_are_free(num_new):
    needed = -(-num_new // 4)
    for num_blocks, fits in ((needed + 1, True), (needed, False)):
        if num_blocks < 2:
            continue
        manager = make_manager(SOUND, TEXT, num_blocks=num_blocks)
        request = make(range(40))
        computed = manager.get_computed_blocks(request)
        assert manager.admit(request, computed, num_new, reserve=0) is fits


def test_another_text_finds_the_sound_and_evicted_parts_shorten_the_prefix():
    manager = make_manager(SOUND, TEXT, num_blocks=12, events=True)
    first = start(manager, range(22))
    stored = [event for event in manager.take_events() if isinstance(event, BlockStored)]
    assert sum(len(event.block_hashes) for event in stored) == 3
    other = [*range(12), *range(50, 60)]
    assert hit(manager, other).num_tokens == 12
    assert hit(manager, range(22)).num_tokens == 20
    sound, text = (list(table) for table in manager._blocks[first.key])
    manager.free(first)
    evict(manager, text[4])
    assert hit(manager, range(22)).num_tokens == 0  # evict hands out every free block
    again = start(manager, range(22))
    text = manager._blocks[again.key][1]
    assert hit(manager, range(18)).num_tokens == 16
    manager.pool._by_hash[1].pop(text[3].block_hash)
    text[3].block_hash = None
    assert hit(manager, range(18)).num_tokens == 12
    sound = manager._blocks[again.key][0]
    manager.pool._by_hash[0].pop(sound[1].block_hash)
    sound[1].block_hash = None
    assert hit(manager, range(18)).num_tokens == 4
