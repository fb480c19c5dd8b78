"""Tiers in host memory and on a disk: blocks that have lost their last reference go there, and come back."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from penstock_common.types.kv_transfer import BlockName, KvMedium
from penstock_enginecore.kv_transfer.core.base import BlockCopier, BlockHolder, Copy, Follow, Place, batch_of

Told = Callable[[BlockName, bool], None]
"""Called with a block that can be found from now on (True), or no more."""


class SlotIndex:
    """A slot is free, holds a block that can be found, or was taken by somebody who fills it. ``entries``: what is there from
    before. ``told``: see ``Told``; of the entries as well.
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
        """Blocks that can be found."""
        return len(self._slots)

    def __contains__(self, name: BlockName) -> bool:
        return name in self._slots

    @property
    def names(self) -> list[BlockName]:
        """Of the blocks that can be found, those used least recently first."""
        return list(self._slots)

    def get(self, name: BlockName) -> int | None:
        """The slot of a block."""
        return self._slots.get(name)

    def touch(self, name: BlockName) -> int:
        """A block is used: others go first. Returns its slot. KeyError for one that is not there."""
        slot = self._slots[name] = self._slots.pop(name)
        return slot

    def take(self) -> tuple[int, BlockName | None] | None:
        """A slot to fill, and the block that it held, which cannot be found any more. None when all are being filled."""
        if self._free:
            return self._free.pop(), None
        name = next(iter(self._slots), None)
        if name is None:
            return None
        slot = self._slots.pop(name)
        self._told(name, False)
        return slot, name

    def put(self, name: BlockName, slot: int) -> None:
        """A slot that was taken holds this block now. Of two with the same the first stays."""
        if name in self._slots:
            self._free.append(slot)
        else:
            self._slots[name] = slot
            self._told(name, True)

    def give_back(self, slot: int) -> None:
        """A slot that was taken holds nothing."""
        self._free.append(slot)

    def remove(self, name: BlockName) -> None:
        """What is in the slot of a block is of no use. One that is not there is passed over."""
        if (slot := self._slots.pop(name, None)) is not None:
            self._free.append(slot)
            self._told(name, False)

    def clear(self) -> None:
        """No block can be found any more."""
        slots, self._slots = self._slots, {}
        self._free += slots.values()
        for name in slots:
            self._told(name, False)


# Blocks that have lost their last reference go to host memory.

logger = logging.getLogger(__name__)

Evicted = Callable[[list[BlockName], list[int]], None]
"""Called with blocks that make room, and the slots in which they still are until something is copied to them."""


class HostTier:
    """Saves blocks, one batch at a time. All methods belong to the busy loop's thread, as do the calls that ``follow`` makes of
    what is over. ``evicted``: see ``Evicted``.

    A save waits until blocks are spared; those that have become free last go first, and of these the begin of a sequence. One
    whose block has been taken for something else meanwhile is dropped.
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
        """Blocks, since the start."""
        self._reserved = copier.reserve(num_slots)
        follow(self._reserved, self._is_reserved)

    @property
    def num_held_blocks(self) -> int:
        """Blocks of the pool that are being saved."""
        return len(self._saving)

    @property
    def usage(self) -> float:
        """Fraction of the slots that hold something, in [0, 1]."""
        return len(self.index) / self.index.num_slots

    def freed(self, places: Sequence[Place]) -> None:
        """Blocks that may be saved."""
        if self._off:
            return
        for place in places:
            if place.name in self.index:
                self.index.touch(place.name)
            else:
                self._queue.pop(place.name, None)
                self._queue[place.name] = place

    def taken(self, names: Iterable[BlockName]) -> None:
        """Blocks that the pool has given to others: they are saved no more."""
        for name in names:
            self._queue.pop(name, None)

    def save(self) -> None:
        """Begin the next batch, if none is under way."""
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
            if found is None:  # there are as many slots as blocks in the batch
                raise RuntimeError(f"no slot for {place.name}")
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

    def load(self, places: Sequence[Place]) -> "Future[None]":
        """Begin to copy blocks that are here into the pool."""
        return self._copier.load([Copy(block_id, self.index.touch(name)) for name, block_id in places])

    def drop_queued(self) -> None:
        """Save nothing of what has been freed so far."""
        self._queue.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._queue.clear()
        self.index.clear()

    def fail(self, error: BaseException) -> None:
        """Copies fail: nothing is kept here any more. The log says so once."""
        if not self._off:
            logger.warning("no KV blocks are kept in host memory any more: %s: %s", type(error).__name__, error)
        self._off = True
        self.clear()

    def _is_reserved(self, done: "Future[None]") -> None:
        if (error := done.exception()) is not None:
            self.fail(error)

    def _saved(self, taken: "list[tuple[Place, int]]", done: "Future[None]") -> None:
        self._under_way = None
        error = done.exception()
        for place, slot in reversed(taken):  # the begin of a sequence is reused last
            del self._saving[place.name]
            self._blocks.release(place)
            if error is None and not self._off:
                self.index.put(place.name, slot)
                self.num_saved += 1
            else:
                self.index.give_back(slot)
        if error is not None:
            self.fail(error)


# Blocks for which host memory has no room any more go to a disk.

_MAX_PENDING_BYTES = 64 << 20
"""Of blocks that wait to be written; more are dropped."""
Content = bytes | memoryview
Over = Callable[[list[Place], list[Place], float], None]
"""Called on any thread with a batch that was to be brought, which is over, what has arrived of it, and how long it was
read, in seconds.
"""


class BlockStore(Protocol):
    """Slots of a disk, each for a block with its name. Reads go before writes that wait. Futures raise OSError."""

    num_slots: int

    @property
    def entries(self) -> Sequence[tuple[int, BlockName]]:
        """What slots held when it was opened, as far as their headers tell."""

    def read(self, slots: Sequence[tuple[int, BlockName]]) -> "Future[list[Content | None]]":
        """Blocks; None for one that is not there, or not whole."""

    def write(self, slot: int, name: BlockName, content: Content) -> "Future[None]":
        """Put a block into a slot."""

    def clear(self) -> None:
        """Nothing that was written so far is ever read again."""

    def close(self) -> None:
        """Behind what is asked for. Idempotent."""


class DiskTier:
    """All methods belong to the busy loop's thread. A disk that fails is used no more; the log says so once."""

    def __init__(
        self,
        store: BlockStore,
        copier: BlockCopier,
        blocks: BlockHolder,
        follow: Follow,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._last_read = 0.0  # belongs to the store's thread
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
        """Blocks, since the start."""

    @property
    def usage(self) -> float:
        """Fraction of the slots that hold something, in [0, 1]."""
        return len(self.index) / self.index.num_slots

    def keep(self, names: list[BlockName], slots: list[int]) -> None:
        """Write blocks that are in slots of the host, and which they leave."""
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
        """Whether another block may wait to be written."""
        return (len(self._writing) + 1) * self._block_bytes <= max(_MAX_PENDING_BYTES, self._block_bytes)

    @property
    def busy(self) -> bool:
        """Whether anything is on its way to the disk."""
        return bool(self._writing)

    def load(self, places: Sequence[Place], over: Over) -> None:
        """Bring blocks that are here into the pool, some at a time. ``over`` is called once for each of these batches, as often
        as ``num_batches`` says.
        """
        for first in range(0, len(places), self._batch):
            batch = list(places[first : first + self._batch])
            slots = [(self.index.touch(name), name) for name, _ in batch]
            self._store.read(slots).add_done_callback(partial(self._read, batch, over, self._clock()))

    def num_batches(self, num_blocks: int) -> int:
        """In how many batches so many blocks come."""
        return -(-num_blocks // self._batch)

    def dropped(self, places: Sequence[Place]) -> None:
        """Blocks that did not come whole: they are of no use."""
        for place in places:
            self.index.remove(place.name)

    def clear(self) -> None:
        """Forget everything."""
        self._generation += 1
        self.index.clear()
        self._store.clear()

    def close(self) -> None:
        """Behind what is being written."""
        self._store.close()

    def _read(self, batch: list[Place], over: Over, asked: float, done: "Future[list[Content | None]]") -> None:
        """The store's thread."""
        now = self._clock()
        seconds, self._last_read = now - max(asked, self._last_read), now
        if (error := done.exception()) is not None:
            logger.warning("KV blocks cannot be read from the disk: %s", error)
            over(batch, [], seconds)
            return
        whole = [(place, content) for place, content in zip(batch, done.result(), strict=True) if content is not None]
        if not whole:
            over(batch, [], seconds)
            return
        places = [place for place, _ in whole]
        written = self._copier.write([place.block_id for place in places], [content for _, content in whole])
        written.add_done_callback(lambda done: over(batch, places if done.exception() is None else [], seconds))

    def _write(self, names: list[BlockName], generation: int, done: "Future[list[bytes]]") -> None:
        error = done.exception()
        contents: Sequence[bytes | None] = [None] * len(names) if error is not None else done.result()
        for name, content in zip(names, contents, strict=True):
            found = None if content is None or self._off or generation != self._generation else self.index.take()
            if found is None or content is None:
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
            logger.warning("no KV blocks are kept on the disk any more: %s", error)
            self._off = True
            self.index.clear()
