"""The pool of KV cache blocks: reference counts, a free list in LRU order, and a map from content to block."""

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import msgspec

from penstock_enginecore.core.kv_cache.spec import KVCacheGroup

NULL_BLOCK_ID = 0
"""Id of the null block, which is never allocated. It pads block tables and replaces blocks that have left the window.
"""


class KVCacheBlock:
    """One block of the pool. A free block that still has a hash can be found and reused.

    Attributes:
        group: The KV cache group that the block's content belongs to, if it has a hash.
        prev: Previous block in the free list, or None while the block is in use.
        next: Next block in the free list, or None while the block is in use.
    """

    __slots__ = ("block_hash", "block_id", "group", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.group = 0
        self.prev: KVCacheBlock | None = None
        self.next: KVCacheBlock | None = None

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_count={self.ref_count})"


class FreeBlockQueue:
    """A doubly linked list of free blocks. The head is reused first. Any block can be removed in O(1)."""

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        # Sentinels: the block after _head is reused first.
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next, self._tail.prev = self._tail, self._head
        self._size = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._size

    def append(self, block: KVCacheBlock) -> None:
        """Add a block to be reused last."""
        self._link(self._tail.prev, block, self._tail)

    def prepend(self, block: KVCacheBlock) -> None:
        """Add a block to be reused first."""
        self._link(self._head, block, self._head.next)

    def remove(self, block: KVCacheBlock) -> None:
        """Remove a block. It must be in the list."""
        before, after = block.prev, block.next
        if before is None or after is None:
            raise RuntimeError(f"{block!r} is not in the free list")
        before.next, after.prev = after, before
        block.prev = block.next = None
        self._size -= 1

    def popleft(self) -> KVCacheBlock:
        """Remove and return the head."""
        block = self._head.next
        if block is None or block is self._tail:
            raise RuntimeError("the free list is empty")
        self.remove(block)
        return block

    def _link(self, before: KVCacheBlock | None, block: KVCacheBlock, after: KVCacheBlock | None) -> None:
        if before is None or after is None or block.prev is not None:
            raise RuntimeError(f"{block!r} is already in the free list")
        before.next = after.prev = block
        block.prev, block.next = before, after
        self._size += 1


class BlockLog:
    """Changes of findable blocks since the last ``take``.

    Attributes:
        cached: Blocks that became findable.
        freed: Findable blocks that lost their last reference.
        evicted: Group, hash and id of blocks that were reused for other content.
    """

    __slots__ = ("cached", "evicted", "freed")

    def __init__(self) -> None:
        self.cached: list[KVCacheBlock] = []
        self.freed: list[KVCacheBlock] = []
        self.evicted: list[tuple[int, bytes, int]] = []

    def take(self) -> "BlockLog":
        """Return all recorded changes and clear the log."""
        taken = BlockLog()
        taken.cached, taken.freed, taken.evicted = self.cached, self.freed, self.evicted
        self.cached, self.freed, self.evicted = [], [], []
        return taken

    def __bool__(self) -> bool:
        return bool(self.cached or self.freed or self.evicted)


class PoolEvents(Protocol):
    """Receiver of changes of a pool's findable blocks."""

    def removed(self, blocks: Iterable[tuple[int, bytes, int]]) -> None:
        """Record that blocks were evicted. Each is given as group, hash and id."""

    def cleared(self) -> None:
        """Record that no block is findable any more."""


class BlockPool:
    """Allocates blocks, and finds cached blocks by hash and group.

    KV cache groups share the blocks but not their content: equal prefixes have equal hashes in each group. If several
    blocks have the same content, only the first one is findable.

    Attributes:
        null_block: Fills places of block tables that hold nothing.
        log: Records changes of findable blocks, or None if they are not needed.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1, events: PoolEvents | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 2: block 0 is the null block")
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.null_block = self.blocks[NULL_BLOCK_ID]
        self._free = FreeBlockQueue(self.blocks[1:])
        self._by_hash: list[dict[bytes, KVCacheBlock]] = [{} for _ in range(num_groups)]
        self._events = events
        self.log: BlockLog | None = None

    @property
    def num_usable_blocks(self) -> int:
        """Number of blocks in the pool, without the null block."""
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that can be allocated now, including blocks with cached content."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use, in [0, 1]."""
        return 1.0 - len(self._free) / self.num_usable_blocks

    def get(self, block_hash: bytes, group: int = 0) -> KVCacheBlock | None:
        """Return the block with this content, or None."""
        return self._by_hash[group].get(block_hash)

    def get_run(self, block_hashes: Iterable[bytes], group: int = 0) -> list[KVCacheBlock]:
        """Return the blocks with these contents, up to the first one that is missing."""
        by_hash = self._by_hash[group]
        blocks = []
        for block_hash in block_hashes:
            block = by_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def hashes(self, group: int = 0) -> Collection[bytes]:
        """Return the hashes of the findable blocks of a group."""
        return self._by_hash[group].keys()

    def allocate(self, count: int) -> list[KVCacheBlock]:
        """Allocate ``count`` blocks, least recently used first. Their cached content is evicted."""
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks wanted, {len(self._free)} free")
        taken, evicted = [], []
        for _ in range(count):
            block = self._free.popleft()
            if block.block_hash is not None:
                evicted.append((block.group, block.block_hash, block.block_id))
                del self._by_hash[block.group][block.block_hash]
                block.block_hash = None
            block.ref_count = 1
            taken.append(block)
        if evicted and self.log is not None:
            self.log.evicted += evicted
        if evicted and self._events is not None:
            self._events.removed(evicted)
        return taken

    def num_free_among(self, tables: Iterable[Iterable[KVCacheBlock]]) -> int:
        """Return how many blocks would leave the free list if they were touched. The null block does not count."""
        null = self.null_block
        return sum(block.ref_count == 0 and block is not null for blocks in tables for block in blocks)

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add one reference to each block except the null block. Free blocks leave the free list."""
        null = self.null_block
        for block in blocks:
            if block is null:
                continue
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

    def free(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Drop one reference to each block of a sequence, given in sequence order. Null blocks are skipped.

        The end of a sequence is reused before its beginning, because more prompts share the beginning. Blocks without a
        hash are reused before all others.
        """
        null = self.null_block
        for block in reversed(blocks):
            if block is null:
                continue
            if block.ref_count < 1:
                raise RuntimeError(f"{block!r} is freed more often than it was allocated")
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.block_hash is None:
                    self._free.prepend(block)
                else:
                    self._free.append(block)
                    if self.log is not None:
                        self.log.freed.append(block)

    def cache(self, block: KVCacheBlock, block_hash: bytes, group: int = 0) -> bool:
        """Make a full, computed block findable. Return False, and do nothing, if a block with the same content is
        findable.
        """
        if block.block_hash is not None:
            raise RuntimeError(f"{block!r} is cached already")
        by_hash = self._by_hash[group]
        if block_hash in by_hash:
            return False
        by_hash[block_hash] = block
        block.block_hash = block_hash
        block.group = group
        if self.log is not None:
            self.log.cached.append(block)
        return True

    def forget(self) -> bool:
        """Forget all cached content. Return False, and do nothing, while a block is in use."""
        if len(self._free) != self.num_usable_blocks:
            return False
        for by_hash in self._by_hash:
            for block in by_hash.values():
                block.block_hash = None
            by_hash.clear()
        if self._events is not None:
            self._events.cleared()
        return True


# Search for the longest prefix that every KV cache group can start from.


class ComputedBlocks(msgspec.Struct, frozen=True):
    """Cached blocks that a request can start from, and the number of tokens that it need not compute.

    There is one list per group, and all lists have the same length. A place that later queries of a group do not see
    holds the null block.

    Attributes:
        branch: Number of tokens whose blocks are cached, if no state is kept at their end. 0 otherwise.
    """

    blocks: tuple[list[KVCacheBlock], ...]
    num_tokens: int = 0
    branch: int = 0

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the prefix, including null blocks."""
        return len(self.blocks[0])


def find_computed_blocks(
    pool: BlockPool, groups: Sequence[KVCacheGroup], hashes: Sequence[bytes], block_size: int, num_tokens: int
) -> ComputedBlocks:
    """Find the longest common prefix in whole blocks that leaves at least the last of ``num_tokens`` tokens to compute.

    A group without a window needs every block of the prefix. A group with a window needs the blocks that the first
    query after the prefix sees. A missing block in one group shortens the prefix for all groups, and a shorter prefix
    needs other blocks. The search therefore repeats until the length stays the same.
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
    """Return the index of the first block that the first query after ``length`` cached blocks sees.

    If everything is cached, that query is the last token, which is computed again. The token's keys and values are
    written to the last block again, so that block is always needed.
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
    """Return the longest prefix, of at most ``length`` blocks, whose last blocks are cached as far back as the group
    needs.
    """
    index = length - 1
    while index >= first_block(group, length, block_size, num_tokens):
        if pool.get(hashes[index], number) is None:
            length = index
        index -= 1
    return length
