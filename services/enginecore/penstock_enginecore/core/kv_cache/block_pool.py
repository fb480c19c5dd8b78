"""The pool of KV cache blocks: reference counts, the free list in LRU order, and the map from content to block."""

from collections.abc import Iterable, Sequence

NULL_BLOCK_ID = 0
"""Never handed out: padding in block tables points at it."""


class KVCacheBlock:
    """One block of the pool. A free block that still has a hash can be found and used again.

    ``prev`` and ``next`` link the free list and are None while the block is in use.
    """

    __slots__ = ("block_hash", "block_id", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
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


class BlockPool:
    """Hands out blocks and finds cached ones by hash.

    Of several blocks with the same content only the first is findable; the others are plain blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 2: block 0 is the null block")
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self._free = FreeBlockQueue(self.blocks[1:])
        self._by_hash: dict[bytes, KVCacheBlock] = {}

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

    def get(self, block_hash: bytes) -> KVCacheBlock | None:
        """The block with this content, or None."""
        return self._by_hash.get(block_hash)

    def allocate(self, count: int) -> list[KVCacheBlock]:
        """Take ``count`` blocks, least recently used first; what they held is forgotten."""
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks wanted, {len(self._free)} free")
        taken = []
        for _ in range(count):
            block = self._free.popleft()
            if block.block_hash is not None:
                del self._by_hash[block.block_hash]
                block.block_hash = None
            block.ref_count = 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add one reference to each block; a free one leaves the free list."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

    def free(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Give back one reference to each block of a sequence, in the sequence's order.

        The end of a sequence is reused before its beginning, which more prompts share; blocks that cannot be found
        again are reused before all others.
        """
        for block in reversed(blocks):
            if block.ref_count < 1:
                raise RuntimeError(f"{block!r} is freed more often than it was taken")
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.block_hash is None:
                    self._free.prepend(block)
                else:
                    self._free.append(block)

    def cache(self, block: KVCacheBlock, block_hash: bytes) -> None:
        """Make a full, computed block findable, unless a block with the same content is."""
        if block.block_hash is not None:
            raise RuntimeError(f"{block!r} is cached already")
        if block_hash not in self._by_hash:
            self._by_hash[block_hash] = block
            block.block_hash = block_hash

    def forget(self) -> bool:
        """Forget all cached content. Returns False, and does nothing, while a block is in use."""
        if len(self._free) != self.num_usable_blocks:
            return False
        for block in self._by_hash.values():
            block.block_hash = None
        self._by_hash.clear()
        return True
