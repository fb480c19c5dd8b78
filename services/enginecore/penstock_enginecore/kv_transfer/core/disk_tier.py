"""Blocks for which host memory has no room any more go to a disk, and come back from there."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from penstock_common.types.kv_transfer import BlockName, KvMedium
from penstock_enginecore.kv_transfer.core.base import BlockHolder, Place
from penstock_enginecore.kv_transfer.core.copier import BlockCopier, Follow, batch_of
from penstock_enginecore.kv_transfer.core.slot_index import SlotIndex

logger = logging.getLogger(__name__)

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
