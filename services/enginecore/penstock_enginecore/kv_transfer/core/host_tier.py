"""Blocks that have lost their last reference go to host memory, and come back from there."""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from penstock_common.types.kv_transfer import BlockName, KvMedium
from penstock_enginecore.kv_transfer.core.base import BlockHolder, Place
from penstock_enginecore.kv_transfer.core.copier import BlockCopier, Copy, Follow, batch_of
from penstock_enginecore.kv_transfer.core.slot_index import SlotIndex

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
