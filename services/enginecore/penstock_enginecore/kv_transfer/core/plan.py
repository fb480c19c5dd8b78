"""Planning of loads: finds the blocks and the recurrent state that a request could load instead of computing them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock_common.types.kv_transfer import BlockName
from penstock_enginecore.core.kv_cache.block_pool import (
    BlockPool,
    KVCacheBlock,
    cached_from_start,
    first_block,
    prefix_of,
)
from penstock_enginecore.core.kv_cache.spec import KVCacheGroup

Lookup = Callable[[Sequence[Sequence[BlockName]]], int]
"""Function ``KVConnector.lookup`` with the argument for one request filled in."""


class LoadPlan(NamedTuple):
    """A prefix of a request that could be used if the missing blocks are loaded.

    Attributes:
        num_blocks: Length of the prefix in blocks.
        missing: Names of needed blocks that are not in the pool, in the order of their positions.
        there: Needed blocks that are already in the pool, by group.
        state: Name of the recurrent state at the end of the prefix, if the model has states and this state is not in
            the state pool.
    """

    num_blocks: int
    missing: list[BlockName]
    there: tuple[list[KVCacheBlock], ...]
    state: BlockName | None = None


def plan_load(
    pool: BlockPool,
    groups: Sequence[KVCacheGroup],
    hashes: Sequence[bytes],
    block_size: int,
    num_tokens: int,
    lookup: Lookup,
) -> LoadPlan:
    """Find the longest prefix, in whole blocks, for which every needed block is in the pool or can be loaded.

    As in ``find_computed_blocks``, a group without an attention window needs all blocks of the prefix that it stores. A
    group with a window needs the blocks to which the first query after the prefix attends. Blocks without memory are
    never looked up, because they have no content to load.
    """
    full = [number for number, group in enumerate(groups) if group.has_memory and not group.is_windowed]
    windowed = [number for number, group in enumerate(groups) if group.is_windowed]
    if full:
        stored = {number: groups[number].indices(0, len(hashes)) for number in full}
        start = min(
            prefix_of(group, len(cached_from_start(pool, number, group, hashes)), len(hashes))
            for number, group in enumerate(groups)
            if number in stored
        )
        lacking = [
            [
                BlockName(number, hashes[index])
                for number in full
                if index in stored[number] and pool.get(hashes[index], number) is None
            ]
            for index in range(start, len(hashes))
        ]
        length = start + (lookup(lacking) if lacking else 0)
    else:
        start, lacking, length = 0, [], len(hashes)
    known: dict[BlockName, bool] = {}

    def has(number: int, block_hash: bytes) -> bool:
        if pool.get(block_hash, number) is not None:
            return True
        name = BlockName(number, block_hash)
        if name not in known:
            known[name] = lookup([[name]]) > 0
        return known[name]

    before = -1
    while windowed and length and length != before:
        before = length
        for number in windowed:
            index = length - 1
            while index >= first_block(groups[number], length, block_size, num_tokens):
                if not has(number, hashes[index]):
                    length = index
                index -= 1
    missing = [name for names in lacking[: max(length - start, 0)] for name in names]
    there = []
    for number, group in enumerate(groups):
        first = first_block(group, length, block_size, num_tokens) if group.is_windowed else 0
        needed = group.indices(first, length)
        found = [(hashes[index], pool.get(hashes[index], number)) for index in needed]
        there.append([block for _, block in found if block is not None])
        if group.is_windowed or not group.has_memory:
            missing += [BlockName(number, block_hash) for block_hash, block in found if block is None]
    return LoadPlan(length, missing, tuple(there))
