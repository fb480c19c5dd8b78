"""Tiers in host memory and on a disk. They store KV blocks that no request in the engine uses any more, so that later
requests can load the blocks again.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from penstock_common.types.kv_transfer import BlockName, KvMedium
from penstock_enginecore.kv_transfer.core.base import BlockCopier, BlockHolder, Content, Copy, Follow, Place, batch_of

Told = Callable[[BlockName, bool], None]
"""Function that is called with the name of a block, and with True if the block became findable or False if the block
was lost.
"""


class SlotIndex:
    """Index of a tier's slots by block name, in LRU order.

    A slot is free, or contains a findable block, or is being filled. ``entries`` are slots with blocks from a previous
    run of the engine. ``told`` is called for every block that becomes findable or is lost, including the blocks of
    ``entries``.
    """

    def __init__(self, num_slots: int, told: Told, entries: Iterable[tuple[int, BlockName]] = ()) -> None:
        self.num_slots = num_slots
        self._told = told
        self._slots: dict[BlockName, int] = {name: slot for slot, name in entries}
        taken = set(self._slots.values())
        self._free = [slot for slot in range(num_slots - 1, -1, -1) if slot not in taken]
        for name in self._slots:
            told(name, True)

    def __len__(self) -> int:
        """Return the number of findable blocks."""
        return len(self._slots)

    def __contains__(self, name: BlockName) -> bool:
        return name in self._slots

    @property
    def names(self) -> list[BlockName]:
        """Names of the findable blocks, least recently used first."""
        return list(self._slots)

    def get(self, name: BlockName) -> int | None:
        """Return the slot of a block, or None if no slot contains the block."""
        return self._slots.get(name)

    def touch(self, name: BlockName) -> int:
        """Mark a block as most recently used, and return its slot. Raises KeyError if the block is not in the index."""
        slot = self._slots[name] = self._slots.pop(name)
        return slot

    def take(self) -> tuple[int, BlockName | None] | None:
        """Reserve a slot to be filled. Return the slot, and the name of the block that was evicted from the slot, or
        None if the slot was free. Return None if all slots are being filled.
        """
        if self._free:
            return self._free.pop(), None
        name = next(iter(self._slots), None)
        if name is None:
            return None
        slot = self._slots.pop(name)
        self._told(name, False)
        return slot, name

    def put(self, name: BlockName, slot: int) -> None:
        """Record that a reserved slot now contains this block. If the block is already in another slot, ``slot``
        becomes free.
        """
        if name in self._slots:
            self._free.append(slot)
        else:
            self._slots[name] = slot
            self._told(name, True)

    def give_back(self, slot: int) -> None:
        """Free a reserved slot that was not filled."""
        self._free.append(slot)

    def remove(self, name: BlockName) -> None:
        """Remove a block whose content is invalid. If the block is not in the index, do nothing."""
        if (slot := self._slots.pop(name, None)) is not None:
            self._free.append(slot)
            self._told(name, False)

    def clear(self) -> None:
        """Remove all blocks from the index."""
        slots, self._slots = self._slots, {}
        self._free += slots.values()
        for name in slots:
            self._told(name, False)


# Host memory tier.

logger = logging.getLogger(__name__)

Evicted = Callable[[list[BlockName], list[int]], None]
"""Callback that gets evicted blocks and their slots. The slots keep the blocks' content until the next copy into the
slots.
"""


class HostTier:
    """Saves blocks from the pool to host memory, one batch at a time. All methods, and the callbacks that ``follow``
    calls, run on the busy loop's thread.

    A save waits until the pool has blocks that no request needs now. Blocks that were freed last are saved first. Among
    the blocks of a sequence, the first blocks are saved first. If the pool evicts a block before its save begins, the
    save is dropped.
    """

    def __init__(
        self,
        copier: BlockCopier,
        num_slots: int,
        blocks: BlockHolder,
        follow: Follow,
        evicted: Evicted | None = None,
    ) -> None:
        self._copier = copier
        self._blocks = blocks
        self._follow = follow
        self._evicted = evicted
        self.index = SlotIndex(num_slots, partial(blocks.findable, KvMedium.HOST))
        self._batch = batch_of(copier.block_bytes)
        self._queue: dict[BlockName, Place] = {}
        self._saving: dict[BlockName, Place] = {}
        self._under_way: Future[None] | None = None
        self._off = False
        self.num_saved = 0
        """Number of blocks that were saved to host memory since the engine started."""
        self._reserved = copier.reserve(num_slots)
        follow(self._reserved, self._is_reserved)

    @property
    def num_held_blocks(self) -> int:
        """Number of blocks of the pool that the tier holds, because they are being saved."""
        return len(self._saving)

    @property
    def usage(self) -> float:
        """Fraction of the slots in use, in [0, 1]."""
        return len(self.index) / self.index.num_slots

    def freed(self, places: Sequence[Place]) -> None:
        """Queue blocks that lost their last reference to be saved."""
        if self._off:
            return
        for place in places:
            if place.name in self.index:
                self.index.touch(place.name)
            else:
                self._queue.pop(place.name, None)
                self._queue[place.name] = place

    def taken(self, names: Iterable[BlockName]) -> None:
        """Remove blocks from the queue of saves, because the pool has evicted them."""
        for name in names:
            self._queue.pop(name, None)

    def save(self) -> None:
        """Begin to save the next batch of queued blocks, if no batch is in flight."""
        if self._under_way is not None or not self._queue or not self._reserved.done():
            return
        count = min(self._batch, self._blocks.num_spare, self.index.num_slots)
        places: list[Place] = []
        while self._queue and len(places) < count:
            name, place = self._queue.popitem()
            if name not in self.index and self._blocks.hold(place):
                places.append(place)
        copies, evicted, taken = [], [], []
        for place in places:
            found = self.index.take()
            if found is None:  # This cannot happen: a batch never has more blocks than the tier has slots.
                raise RuntimeError(f"the host memory tier has no free slot for block {place.name}")
            slot, before = found
            if before is not None:
                evicted.append((before, slot))
            self._saving[place.name] = place
            copies.append(Copy(place.block_id, slot))
            taken.append((place, slot))
        if not copies:
            return
        if evicted and self._evicted is not None:
            self._evicted([name for name, _ in evicted], [slot for _, slot in evicted])
        self._under_way = self._copier.save(copies)
        self._follow(self._under_way, partial(self._saved, taken))

    def load(self, places: Sequence[Place]) -> "tuple[list[int], Future[list[int]]]":
        """Begin to copy blocks from host memory to the pool. Return the slots of the blocks, and a future whose result
        is the list of damaged slots.
        """
        copies = [Copy(block_id, self.index.touch(name)) for name, block_id in places]
        return [copy.slot for copy in copies], self._copier.load(copies)

    def dropped(self, places: Sequence[Place]) -> None:
        """Remove damaged blocks."""
        for place in places:
            self.index.remove(place.name)

    def drop_queued(self) -> None:
        """Drop all queued saves."""
        self._queue.clear()

    def clear(self) -> None:
        """Drop all blocks."""
        self._queue.clear()
        self.index.clear()

    def fail(self, error: BaseException) -> None:
        """Switch the host memory tier off after a failed copy. Only the first failure is logged."""
        if not self._off:
            logger.warning(
                "the KV cache tier in host memory is switched off after an error: %s: %s", type(error).__name__, error
            )
        self._off = True
        self.clear()

    def _is_reserved(self, done: "Future[None]") -> None:
        if (error := done.exception()) is not None:
            self.fail(error)

    def _saved(self, taken: "list[tuple[Place, int]]", done: "Future[None]") -> None:
        self._under_way = None
        error = done.exception()
        # Add the blocks in reverse order, so that slots with the first blocks of a sequence are reused last.
        for place, slot in reversed(taken):
            del self._saving[place.name]
            self._blocks.release(place)
            if error is None and not self._off:
                self.index.put(place.name, slot)
                self.num_saved += 1
            else:
                self.index.give_back(slot)
        if error is not None:
            self.fail(error)


# Disk tier, for blocks evicted from host memory.

_MAX_PENDING_BYTES = 64 << 20
"""Maximum total size in bytes of the blocks that are queued to be written to the disk. Blocks beyond this limit are not
written.
"""
Over = Callable[[list[Place], list[Place], float], None]
"""Callback that is called on any thread when a batch has been loaded. Arguments: the batch's places, the places whose
blocks arrived, and the read time in seconds.
"""


class BlockStore(Protocol):
    """Interface to a file of slots on a disk. Each slot stores one block and its name. Reads have priority over queued
    writes. If the disk fails, futures raise OSError.
    """

    num_slots: int

    @property
    def entries(self) -> Sequence[tuple[int, BlockName]]:
        """Slots and names of the blocks that the file contained when it was opened, according to the headers of the
        slots.
        """

    def read(self, slots: Sequence[tuple[int, BlockName]]) -> "Future[list[Content | None]]":
        """Read the blocks in these slots. The result for a block is None if the slot does not contain the block or the
        block is damaged.
        """

    def write(self, slot: int, name: BlockName, content: Content) -> "Future[None]":
        """Write a block to a slot."""

    def clear(self) -> None:
        """Invalidate all blocks that were written before this call."""

    def close(self) -> None:
        """Close the file after pending reads and writes. Idempotent."""


class DiskTier:
    """Stores blocks on a disk. Only the busy loop's thread may call the methods. After a failed write, the tier is
    switched off, and this is logged once.
    """

    def __init__(
        self,
        store: BlockStore,
        copier: BlockCopier,
        blocks: BlockHolder,
        follow: Follow,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._last_read = 0.0  # Only the store's thread uses this attribute.
        self._store = store
        self._copier = copier
        self._follow = follow
        self._block_bytes = copier.block_bytes
        self._batch = batch_of(copier.block_bytes)
        self.index = SlotIndex(store.num_slots, partial(blocks.findable, KvMedium.DISK), store.entries)
        self._writing: set[BlockName] = set()
        self._generation = 0
        self._off = False
        self.num_written = 0
        """Number of blocks that were written to the disk since the engine started."""

    @property
    def usage(self) -> float:
        """Fraction of the slots in use, in [0, 1]."""
        return len(self.index) / self.index.num_slots

    def keep(self, names: list[BlockName], slots: list[int]) -> None:
        """Write blocks to the disk. The host memory tier is about to evict these blocks from the given slots."""
        wanted = []
        for name, slot in zip(names, slots, strict=True):
            if name in self.index:
                self.index.touch(name)
            elif not self._off and name not in self._writing and self.has_room:
                self._writing.add(name)
                wanted.append((name, slot))
        if wanted:
            read = self._copier.read_slots([slot for _, slot in wanted])
            self._follow(read, partial(self._write, [name for name, _ in wanted], self._generation))

    @property
    def has_room(self) -> bool:
        """Whether one more block may be queued to be written to the disk."""
        return (len(self._writing) + 1) * self._block_bytes <= max(_MAX_PENDING_BYTES, self._block_bytes)

    @property
    def busy(self) -> bool:
        """Whether blocks are being written to the disk."""
        return bool(self._writing)

    def load(self, places: Sequence[Place], over: Over) -> None:
        """Load blocks from the disk into the pool in batches. ``over`` is called once per batch, ``num_batches`` times
        in total.
        """
        for first in range(0, len(places), self._batch):
            batch = list(places[first : first + self._batch])
            slots = [(self.index.touch(name), name) for name, _ in batch]
            self._store.read(slots).add_done_callback(partial(self._read, batch, over, self._clock()))

    def num_batches(self, num_blocks: int) -> int:
        """Return the number of batches in which ``num_blocks`` blocks are loaded."""
        return -(-num_blocks // self._batch)

    def dropped(self, places: Sequence[Place]) -> None:
        """Remove damaged blocks."""
        for place in places:
            self.index.remove(place.name)

    def clear(self) -> None:
        """Drop all blocks."""
        self._generation += 1
        self.index.clear()
        self._store.clear()

    def close(self) -> None:
        """Close the file after pending reads and writes."""
        self._store.close()

    def _read(self, batch: list[Place], over: Over, asked: float, done: "Future[list[Content | None]]") -> None:
        """Handle a finished read of one batch. Runs on the thread of the store."""
        now = self._clock()
        seconds, self._last_read = now - max(asked, self._last_read), now
        if (error := done.exception()) is not None:
            logger.warning("cannot read KV blocks from the disk tier, so the engine recomputes these blocks: %s", error)
            over(batch, [], seconds)
            return
        whole = [(place, content) for place, content in zip(batch, done.result(), strict=True) if content is not None]
        if not whole:
            over(batch, [], seconds)
            return
        places = [place for place, _ in whole]
        written = self._copier.write([place.block_id for place in places], [content for _, content in whole])
        written.add_done_callback(lambda done: over(batch, places if done.exception() is None else [], seconds))

    def _write(self, names: list[BlockName], generation: int, done: "Future[list[bytes | None]]") -> None:
        failed = done.exception() is not None
        contents: Sequence[bytes | None] = [None] * len(names) if failed else done.result()
        for name, content in zip(names, contents, strict=True):
            if content is None and not failed:
                logger.warning(
                    "a damaged state of recurrent layers in the host memory tier is not written to the disk tier"
                )
            found = None if not content or self._off or generation != self._generation else self.index.take()
            if found is None or not content:
                self._writing.discard(name)
                continue
            written = self._store.write(found[0], name, content)
            self._follow(written, partial(self._written, name, found[0], generation))

    def _written(self, name: BlockName, slot: int, generation: int, done: "Future[None]") -> None:
        self._writing.discard(name)
        error = done.exception()
        if error is None and generation == self._generation and not self._off:
            self.index.put(name, slot)
            self.num_written += 1
            return
        self.index.give_back(slot)
        if error is not None and not self._off:
            logger.warning("the KV cache tier on disk is switched off after an error: %s", error)
            self._off = True
            self.index.clear()
