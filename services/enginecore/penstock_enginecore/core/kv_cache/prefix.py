"""The longest prefix that every group of layers can start from."""

from collections.abc import Sequence

import msgspec

from penstock_enginecore.core.kv_cache.block_pool import BlockPool, KVCacheBlock
from penstock_enginecore.core.kv_cache.spec import KVCacheGroup


class ComputedBlocks(msgspec.Struct, frozen=True):
    """Cached blocks a request can start from, one list per group and all as long, and the tokens it need not compute.

    Places that no later query of a group sees hold the null block.
    """

    blocks: tuple[list[KVCacheBlock], ...]
    num_tokens: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the prefix, null blocks included."""
        return len(self.blocks[0])


def find_computed_blocks(
    pool: BlockPool, groups: Sequence[KVCacheGroup], hashes: Sequence[bytes], block_size: int, num_tokens: int
) -> ComputedBlocks:
    """The longest common prefix in whole blocks, leaving at least the last of ``num_tokens`` tokens to compute.

    A group without a window needs every block of the prefix. A group with one needs the blocks that the first query
    after the prefix sees. What one group lacks shortens the prefix for all of them, and a shorter prefix ends in other
    windows: so until nobody shortens it any more.
    """
    from_start: dict[int, list[KVCacheBlock]] = {}
    for number, group in enumerate(groups):
        if not group.is_windowed:
            from_start[number] = pool.get_run(hashes, number)
    length = min((len(blocks) for blocks in from_start.values()), default=len(hashes))
    windowed = [(number, group) for number, group in enumerate(groups) if group.is_windowed]
    before = -1
    while length and length != before:
        before = length
        for number, group in windowed:
            length = _cached_at_end(pool, number, group, hashes, length, block_size, num_tokens)
    tables = []
    for number, group in enumerate(groups):
        if number in from_start:
            tables.append(from_start[number][:length])
        else:
            first = first_block(group, length, block_size, num_tokens)
            tables.append([pool.null_block] * first + pool.get_run(hashes[first:length], number))
    return ComputedBlocks(tuple(tables), min(length * block_size, num_tokens - 1))


def first_block(group: KVCacheGroup, length: int, block_size: int, num_tokens: int) -> int:
    """The first block that the first query after ``length`` cached blocks sees.

    That query is the last token when everything is cached: it is computed again, and its keys and values are written
    again into the last block, which therefore is always among those needed.
    """
    return group.first_key(min(length * block_size, num_tokens - 1)) // block_size


def _cached_at_end(
    pool: BlockPool,
    number: int,
    group: KVCacheGroup,
    hashes: Sequence[bytes],
    length: int,
    block_size: int,
    num_tokens: int,
) -> int:
    """The longest prefix, of ``length`` blocks at most, whose last blocks are cached as far back as the group needs."""
    index = length - 1
    while index >= first_block(group, length, block_size, num_tokens):
        if pool.get(hashes[index], number) is None:
            length = index
        index -= 1
    return length
