"""The pool of KV cache blocks: reference counts, free list in LRU order, content to block, longest cached prefix."""

from collections.abc import Collection, Iterable, Sequence

import msgspec

from penstock_enginecore.core.kv_cache.events import KvEventLog
from penstock_enginecore.core.kv_cache.spec import KVCacheGroup

NULL_BLOCK_ID = 0
"""Never handed out: padding in block tables points at it, and so do places whose block has left the window."""


class KVCacheBlock:
    """One block of the pool. A free block that still has a hash can be found and used again.

    ``group`` says whose keys and values a block with a hash holds. ``prev`` and ``next`` link the free list and are None
    while the block is in use.
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
    """Doubly linked list of free blocks. The head is reused first; any block can leave in O(1)."""

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        # The ends of the list: the head's next is reused first.
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next, self._tail.prev = self._tail, self._head
        self._size = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._size

    def append(self, block: KVCacheBlock) -> None:
        """Add a block that is reused last."""
        self._link(self._tail.prev, block, self._tail)

    def prepend(self, block: KVCacheBlock) -> None:
        """Add a block that is reused next."""
        self._link(self._head, block, self._head.next)

    def remove(self, block: KVCacheBlock) -> None:
        """Take out a block that is in the list."""
        before, after = block.prev, block.next
        if before is None or after is None:
            raise RuntimeError(f"{block!r} is not in the free list")
        before.next, after.prev = after, before
        block.prev = block.next = None
        self._size -= 1

    def popleft(self) -> KVCacheBlock:
        """Take the head."""
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
    """What has happened to findable blocks since somebody looked: ``cached``, they have become findable; ``freed``, they have
    lost their last reference; ``evicted``: by group and hash, they were taken for something else.
    """

    __slots__ = ("cached", "evicted", "freed")

    def __init__(self) -> None:
        self.cached: list[KVCacheBlock] = []
        self.freed: list[KVCacheBlock] = []
        self.evicted: list[tuple[int, bytes, int]] = []

    def take(self) -> "BlockLog":
        """All of it; what follows is told anew."""
        taken = BlockLog()
        taken.cached, taken.freed, taken.evicted = self.cached, self.freed, self.evicted
        self.cached, self.freed, self.evicted = [], [], []
        return taken

    def __bool__(self) -> bool:
        return bool(self.cached or self.freed or self.evicted)


class BlockPool:
    """Hands out blocks and finds cached ones by hash and group. ``null_block`` fills places of tables that hold nothing.

    Groups share the blocks but not their content: equal prefixes have equal hashes in each of them.
    Of several blocks with the same content only the first is findable; the others are plain blocks. ``log``: where somebody wants
    to know of blocks that come and go.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1, events: KvEventLog | None = None) -> None:
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
        """Blocks that can be handed out when nothing is in use."""
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now, those with cached content included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use, in [0, 1]."""
        return 1.0 - len(self._free) / self.num_usable_blocks

    def get(self, block_hash: bytes, group: int = 0) -> KVCacheBlock | None:
        """The block with this content, or None."""
        return self._by_hash[group].get(block_hash)

    def get_run(self, block_hashes: Iterable[bytes], group: int = 0) -> list[KVCacheBlock]:
        """The blocks with these contents, up to the first that is not there."""
        by_hash = self._by_hash[group]
        blocks = []
        for block_hash in block_hashes:
            block = by_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def hashes(self, group: int = 0) -> Collection[bytes]:
        """Of the blocks that can be found in a group now."""
        return self._by_hash[group].keys()

    def allocate(self, count: int) -> list[KVCacheBlock]:
        """Take ``count`` blocks, least recently used first; what they held is forgotten."""
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
        """Blocks, the null block excepted, that would leave the free list if they were touched."""
        null = self.null_block
        return sum(block.ref_count == 0 and block is not null for blocks in tables for block in blocks)

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add one reference to each block, the null block excepted; a free one leaves the free list."""
        null = self.null_block
        for block in blocks:
            if block is null:
                continue
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

    def free(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Give back one reference to each block of a sequence, in the sequence's order. Null blocks are passed over.

        The end of a sequence is reused before its beginning, which more prompts share; blocks that cannot be found
        again are reused before all others.
        """
        null = self.null_block
        for block in reversed(blocks):
            if block is null:
                continue
            if block.ref_count < 1:
                raise RuntimeError(f"{block!r} is freed more often than it was taken")
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.block_hash is None:
                    self._free.prepend(block)
                else:
                    self._free.append(block)
                    if self.log is not None:
                        self.log.freed.append(block)

    def cache(self, block: KVCacheBlock, block_hash: bytes, group: int = 0) -> bool:
        """Make a full, computed block findable, unless a block with the same content is. Says whether it did."""
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
        """Forget all cached content. Returns False, and does nothing, while a block is in use."""
        if len(self._free) != self.num_usable_blocks:
            return False
        for by_hash in self._by_hash:
            for block in by_hash.values():
                block.block_hash = None
            by_hash.clear()
        if self._events is not None:
            self._events.cleared()
        return True


# The longest prefix that every group of layers can start from.


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
