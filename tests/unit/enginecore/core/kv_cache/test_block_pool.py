"""Blocks: the free list's order, references, and content that survives until it is needed."""

import pytest

from penstock_enginecore.core.kv_cache.block_pool import NULL_BLOCK_ID, BlockPool


def ids(blocks):
    return [block.block_id for block in blocks]


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(5)
    assert NULL_BLOCK_ID not in ids(pool.allocate(4))
    assert pool.num_free_blocks == 0


def test_more_blocks_than_free_is_an_error():
    with pytest.raises(RuntimeError, match="cannot allocate 4 blocks: only 3 are free"):
        BlockPool(4).allocate(4)


def test_a_pool_needs_a_block_besides_the_null_block():
    with pytest.raises(ValueError, match="num_blocks is 1"):
        BlockPool(1)


def test_usage_is_the_fraction_in_use():
    pool = BlockPool(5)
    blocks = pool.allocate(1)
    assert pool.usage == pytest.approx(0.25)
    pool.free(blocks)
    assert pool.usage == 0


def test_a_freed_block_keeps_its_content_until_it_is_needed():
    pool = BlockPool(4)
    first = pool.allocate(1)
    pool.cache(first[0], b"content")
    pool.free(first)
    assert pool.get(b"content") is first[0]
    pool.allocate(2)
    assert pool.get(b"content") is first[0]
    pool.allocate(1)
    assert pool.get(b"content") is None


def test_the_least_recently_freed_content_goes_first():
    pool = BlockPool(4)
    a, b, c = pool.allocate(3)
    for block, name in ((a, b"a"), (b, b"b"), (c, b"c")):
        pool.cache(block, name)
    pool.free([b])
    pool.free([a])
    pool.free([c])
    assert pool.allocate(3) == [b, a, c]


def test_the_end_of_a_sequence_goes_before_its_beginning():
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.cache(block, bytes([block.block_id]))
    pool.free(blocks)
    assert pool.allocate(3) == blocks[::-1]


def test_blocks_without_content_go_before_those_with():
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    pool.cache(a, b"a")
    pool.free([a])
    pool.free([b])
    assert pool.allocate(1) == [b]
    assert pool.get(b"a") is a


def test_a_touched_block_leaves_the_free_list_and_returns_with_its_last_reference():
    pool = BlockPool(3)
    [block] = pool.allocate(1)
    pool.cache(block, b"x")
    pool.free([block])
    pool.touch([block])
    pool.touch([block])
    assert pool.num_free_blocks == 1
    pool.free([block])
    assert pool.num_free_blocks == 1
    pool.free([block])
    assert pool.num_free_blocks == 2


def test_freeing_twice_is_an_error():
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(RuntimeError, match="was freed more often than it was allocated"):
        pool.free(blocks)


def test_a_second_block_with_the_same_content_stays_a_plain_block():
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    pool.cache(a, b"same")
    pool.cache(b, b"same")
    pool.free([a])
    pool.free([b])
    assert pool.get(b"same") is a
    assert pool.allocate(1) == [b]
    assert pool.get(b"same") is a


def test_caching_a_block_twice_is_an_error():
    pool = BlockPool(3)
    [a] = pool.allocate(1)
    pool.cache(a, b"1")
    with pytest.raises(RuntimeError, match="is already in the prefix cache"):
        pool.cache(a, b"2")


def test_content_is_forgotten_only_while_nothing_is_in_use():
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.cache(blocks[0], b"x")
    assert not pool.forget()
    assert pool.get(b"x")
    pool.free(blocks)
    assert pool.forget()
    assert pool.get(b"x") is None
    pool.cache(pool.allocate(1)[0], b"y")


def test_groups_share_blocks_but_not_content():
    pool = BlockPool(4, num_groups=2)
    a, b = pool.allocate(2)
    assert pool.cache(a, b"same", 0)
    assert pool.get(b"same", 1) is None
    assert pool.cache(b, b"same", 1)
    assert pool.get(b"same", 0) is a
    pool.free([a])
    pool.free([b])
    assert a in pool.allocate(2)
    assert pool.get(b"same", 0) is None
    assert pool.get(b"same", 1) is b


def test_null_blocks_are_neither_counted_nor_freed():
    pool = BlockPool(3)
    [block] = pool.allocate(1)
    pool.touch([pool.null_block, block])
    pool.free([pool.null_block, block])
    pool.free([pool.null_block, block, pool.null_block])
    assert pool.null_block.ref_count == 0
    assert pool.num_free_blocks == 2
