"""Blocks that could be loaded: exactly the blocks that make a full pool find the prefix."""

from hypothesis import given
from hypothesis import strategies as st

from penstock_common.types.kv_transfer import BlockName
from penstock_enginecore.core.kv_cache.block_pool import BlockPool, find_computed_blocks
from penstock_enginecore.core.kv_cache.spec import KVCacheGroup
from penstock_enginecore.kv_transfer.core.plan import plan_load

BLOCK = 4
HASHES = [bytes([n]) * 4 for n in range(8)]
FULL = KVCacheGroup(layer_names=("f",))


def group(window: int | None) -> KVCacheGroup:
    return KVCacheGroup(layer_names=(f"w{window}",), sliding_window=window)


def pool_with(names: set[BlockName], num_groups: int) -> BlockPool:
    pool = BlockPool(60, num_groups)
    for name in sorted(names):
        (block,) = pool.allocate(1)
        pool.cache(block, name.hash, name.group)
    return pool


def lookup_in(names: set[BlockName]):
    def lookup(wanted):
        count = 0
        for of_place in wanted:
            if not names.issuperset(of_place):
                break
            count += 1
        return count

    return lookup


def test_blocks_in_the_pool_are_not_loaded():
    names = [BlockName(0, block_hash) for block_hash in HASHES[:5]]
    pool = pool_with(set(names[:2]) | {names[3]}, 1)
    plan = plan_load(pool, [FULL], HASHES, BLOCK, 33, lookup_in(set(names)))
    assert (plan.num_blocks, plan.missing) == (5, [names[2], names[4]])
    assert [block.block_hash for block in plan.there[0]] == [names[0].hash, names[1].hash, names[3].hash]


def test_of_a_window_what_the_next_query_sees_is_brought():
    groups = [FULL, group(5)]
    names = {BlockName(0, h) for h in HASHES[:6]} | {BlockName(1, h) for h in HASHES[4:6]}
    plan = plan_load(pool_with(set(), 2), groups, HASHES, BLOCK, 33, lookup_in(names))
    assert plan.num_blocks == 6
    assert plan.missing == [*(BlockName(0, h) for h in HASHES[:6]), *(BlockName(1, h) for h in HASHES[5:6])]


PARTS = st.builds(
    KVCacheGroup,
    layer_names=st.just(("part",)),
    first_block=st.integers(0, 4),
    end_block=st.none() | st.integers(1, 6),
)
"""Groups that store only some positions."""
NAMES = st.sets(st.builds(BlockName, st.integers(0, 2), st.sampled_from(HASHES)))


@given(
    groups=st.lists(st.sampled_from([None, 1, 3, 5, 9, 14]).map(group) | PARTS, min_size=1, max_size=3),
    here=NAMES,
    elsewhere=NAMES,
    num_hashes=st.integers(0, 8),
    rest=st.integers(0, 3),
)
def test_it_is_what_a_pool_with_both_would_find(groups, here, elsewhere, num_hashes, rest):
    here = {name for name in here if name.group < len(groups)}
    elsewhere = {name for name in elsewhere if name.group < len(groups)}
    hashes = HASHES[:num_hashes]
    num_tokens = max(num_hashes * BLOCK + rest, 1)
    pool = pool_with(here, len(groups))
    plan = plan_load(pool, groups, hashes, BLOCK, num_tokens, lookup_in(elsewhere))
    both = pool_with(here | elsewhere, len(groups))
    assert plan.num_blocks == find_computed_blocks(both, groups, hashes, BLOCK, num_tokens).num_blocks
    assert here.isdisjoint(plan.missing)
    assert elsewhere.issuperset(plan.missing)
    assert len(set(plan.missing)) == len(plan.missing)
    enough = pool_with(here | set(plan.missing), len(groups))
    assert find_computed_blocks(enough, groups, hashes, BLOCK, num_tokens).num_blocks >= plan.num_blocks
