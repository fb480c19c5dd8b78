"""The pool of KV cache blocks: reference counts, a free list in LRU order, and a map from content to block."""

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import msgspec

from penstock_enginecore.core.kv_cache.spec import KVCacheGroup

NULL_BLOCK_ID = 0
"""Id of the null block. The null block is never allocated. It pads block tables, and replaces blocks that are outside a
layer's attention window.
"""


class KVCacheBlock:
    """One block of the pool. A new request can find and share a free block that still has a hash.

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
    """A doubly linked list of free blocks. The block at the head is reused first. Removing any block of the list takes
    O(1) time.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        # Sentinels at both ends of the list. The block after _head is reused first.
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next, self._tail.prev = self._tail, self._head
        self._size = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._size

    def append(self, block: KVCacheBlock) -> None:
        """Add a block at the end of the list, so that it is reused last."""
        self._link(self._tail.prev, block, self._tail)

    def prepend(self, block: KVCacheBlock) -> None:
        """Add a block at the head of the list, so that it is reused first."""
        self._link(self._head, block, self._head.next)

    def remove(self, block: KVCacheBlock) -> None:
        """Remove a block from the list. The block must be in the list."""
        before, after = block.prev, block.next
        if before is None or after is None:
            raise RuntimeError(f"{block!r} is not in the free list")
        before.next, after.prev = after, before
        block.prev = block.next = None
        self._size -= 1

    def popleft(self) -> KVCacheBlock:
        """Remove and return the block at the head of the list."""
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
    """Changes to the set of findable blocks since the last ``take``. A block is findable if prompts can look it up by
    hash.

    Attributes:
        cached: Blocks that became findable.
        freed: Findable blocks that lost their last reference. They stay findable until they are reused.
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
        """Record that blocks were evicted. Each block is given as its group, hash and id."""

    def cleared(self) -> None:
        """Record that no block is findable any more."""


class BlockPool:
    """Allocates blocks, and finds cached blocks by hash and group.

    All KV cache groups use the blocks of this pool, but the content of one block belongs to one group. The same prefix
    of tokens has the same hash in each group. If several blocks have the same content, only the first one is findable.

    Attributes:
        null_block: Block that fills the entries of block tables that need no block.
        log: Records changes to the set of findable blocks, or None if no component needs the changes.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1, events: PoolEvents | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks is {num_blocks}; it must be at least 2, because block 0 is reserved as the null block"
            )
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
        """Fraction of the pool's blocks that are in use, in [0, 1]."""
        return 1.0 - len(self._free) / self.num_usable_blocks

    def get(self, block_hash: bytes, group: int = 0) -> KVCacheBlock | None:
        """Return the block whose content has this hash in this group, or None."""
        return self._by_hash[group].get(block_hash)

    def get_run(self, block_hashes: Iterable[bytes], group: int = 0) -> list[KVCacheBlock]:
        """Return the blocks with these hashes in order, up to the first hash for which the pool has no block."""
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
            raise RuntimeError(f"cannot allocate {count} blocks: only {len(self._free)} are free")
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
        """Return how many of these blocks are in the free list, from which ``touch`` would remove them. The null block
        does not count.
        """
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
        """Drop one reference to each block of a sequence. The blocks are given in the order of the sequence. Null
        blocks are skipped.

        The last blocks of a sequence are reused before its first blocks, because more prompts share the first blocks.
        Blocks without a hash are reused before all other blocks.
        """
        null = self.null_block
        for block in reversed(blocks):
            if block is null:
                continue
            if block.ref_count < 1:
                raise RuntimeError(f"{block!r} was freed more often than it was allocated")
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.block_hash is None:
                    self._free.prepend(block)
                else:
                    self._free.append(block)
                    if self.log is not None:
                        self.log.freed.append(block)

    def hold(self, block_id: int, block_hash: bytes, group: int = 0) -> bool:
        """Add a reference to a block that no request uses, so that its content stays until ``release``. Return False if
        a request uses the block, or if the block no longer has this content.
        """
        block = self.blocks[block_id]
        if block.ref_count or block.block_hash != block_hash or block.group != group:
            return False
        self.touch((block,))
        return True

    def release(self, block_id: int) -> None:
        """Drop the reference that ``hold`` added to a block. The change log gets no entry."""
        log, self.log = self.log, None
        self.free((self.blocks[block_id],))
        self.log = log

    def cache(self, block: KVCacheBlock, block_hash: bytes, group: int = 0) -> bool:
        """Make a full, computed block findable. If another block with the same content is findable, change nothing and
        return False.
        """
        if block.block_hash is not None:
            raise RuntimeError(f"{block!r} is already in the prefix cache")
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
        """Remove the hashes of all blocks, so that no block is findable. If any block is in use, change nothing and
        return False.
        """
        if len(self._free) != self.num_usable_blocks:
            return False
        for by_hash in self._by_hash:
            for block in by_hash.values():
                block.block_hash = None
            by_hash.clear()
        if self._events is not None:
            self._events.cleared()
        return True


# Search for the longest prefix whose blocks are cached in every KV cache group.


class ComputedBlocks(msgspec.Struct, frozen=True):
    """Cached blocks of a request's prefix, and the number of tokens that the request need not compute.

    There is one list of blocks per group, and all lists have the same length. If later queries of a group do not attend
    to a block, the null block is in its place.

    Attributes:
        branch: Number of tokens whose blocks are cached, if the model has recurrent states and no state is kept at the
            end of these tokens. 0 otherwise.
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
    """Find the longest prefix, in whole blocks, that is cached in every group. The prefix never includes the last of
    ``num_tokens`` tokens, which must be computed.

    A group without an attention window needs every block of the prefix that it stores. A group with a window needs the
    blocks to which the first query after the prefix attends. A missing block in one group shortens the prefix of all
    groups. For a shorter prefix, groups with a window need other blocks, so the search repeats until the length no
    longer changes.
    """
    from_start: dict[int, list[KVCacheBlock]] = {}
    length = len(hashes)
    for number, group in enumerate(groups):
        if not group.is_windowed:
            from_start[number] = run = cached_from_start(pool, number, group, hashes)
            length = min(length, prefix_of(group, len(run), len(hashes)))
    windowed = [(number, group) for number, group in enumerate(groups) if group.is_windowed]
    before = -1
    while length and length != before:
        before = length
        for number, group in windowed:
            length = _cached_at_end(pool, number, group, hashes, length, block_size, num_tokens)
    tables = []
    for number, group in enumerate(groups):
        if number in from_start:
            stored = group.indices(0, length)
            before = min(stored.start, length)
            table = [pool.null_block] * before + from_start[number][: len(stored)]
            tables.append(table + [pool.null_block] * (length - len(table)))
        else:
            first = first_block(group, length, block_size, num_tokens)
            tables.append([pool.null_block] * first + pool.get_run(hashes[first:length], number))
    return ComputedBlocks(tuple(tables), min(length * block_size, num_tokens - 1))


def cached_from_start(pool: BlockPool, number: int, group: KVCacheGroup, hashes: Sequence[bytes]) -> list[KVCacheBlock]:
    """Return the cached blocks of a group from the first block that the group stores, up to the first missing block."""
    stored = group.indices(0, len(hashes))
    return pool.get_run(hashes[stored.start : stored.stop], number)


def prefix_of(group: KVCacheGroup, num_cached: int, num_blocks: int) -> int:
    """Return the length in blocks of the longest prefix, of at most ``num_blocks`` blocks, for which a group needs only
    the first ``num_cached`` blocks that it stores.
    """
    stored = group.indices(0, num_blocks)
    return num_blocks if num_cached >= len(stored) else stored.start + num_cached


def first_block(group: KVCacheGroup, length: int, block_size: int, num_tokens: int) -> int:
    """Return the index of the first block to which the first query after ``length`` cached blocks attends.

    If all tokens are cached, that query is the last token, because the last token is recomputed. The step writes the
    token's keys and values to the last block again, so the last block is always needed.
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
    """Return the longest prefix, in blocks and at most ``length``, whose last blocks are cached. The attention window
    of the group decides how many of the last blocks must be cached.
    """
    index = length - 1
    while index >= first_block(group, length, block_size, num_tokens):
        if pool.get(hashes[index], number) is None:
            length = index
        index -= 1
    return length
