"""The memory of a ring: who may hold it, and where what lies in it."""

import ctypes
import fcntl
import mmap
import os
import struct

from penstock_enginecore.executor.multiproc.futex_counter import (
    CLOSED,
    STEP,
    NativeWords,
    Sleepers,
    Words,
    shared_words,
)
from penstock_enginecore.executor.multiproc.native_ring import NativeInbox, NativeRing, RingShape

MASK = 2**31 - 1
"""Slots are counted modulo one more."""
MAX_READERS = 64

_MAGIC = b"penring1"
_SHAPE = struct.Struct("=8sIII")
_SLOT = struct.Struct("=QQ")
_LINE = 128
"""Bytes between words of different processes: two lines of a cache, since processors fetch them in pairs."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class RingMemory:
    """Anonymous shared memory, mapped: whatever ``/dev/shm`` holds does not matter, and it is gone with its last process.

    First a line for the ring's shape, one for the writer's counter (slots written) and one for each reader's (slots read), each
    with the word in which its owner says that it sleeps; behind the writer's, when it wrote the last message of one slot. Then
    for each slot the number of the message that lies in it and the bytes of that message from here on; then the slots' bytes, one
    behind the other, so that a message lies in one piece unless it goes around the end. ``close_writer`` and ``close_reader`` may
    be called by any process, for one that has ended.
    """

    def __init__(self, descriptor: int, words: Words | None = None) -> None:
        """Map a ring that ``create`` made, in any process. Raises ValueError for memory that is none."""
        self._words = words or shared_words()
        size = os.fstat(descriptor).st_size
        if size < _LINE:
            raise ValueError(f"descriptor {descriptor} is no ring: it has {size} bytes")
        self._map = mmap.mmap(descriptor, size)
        self.num_slots: int
        self.slot_bytes: int
        self.num_readers: int
        magic, self.num_slots, self.slot_bytes, self.num_readers = _SHAPE.unpack_from(self._map)
        if magic != _MAGIC or size != _size(self.num_slots, self.slot_bytes, self.num_readers):
            raise ValueError(f"descriptor {descriptor} is no ring of this version")
        self._pinned = ctypes.c_char.from_buffer(self._map)  # the mapping stays as long as this
        start = ctypes.addressof(self._pinned)
        self._head = start + _LINE
        self._tails = [start + (2 + index) * _LINE for index in range(self.num_readers)]
        self._readers_asleep = Sleepers(self._tails[0] + 4, self.num_readers, _LINE)
        self._writer_asleep = Sleepers(self._head + 4)
        self._headers = (2 + self.num_readers) * _LINE
        labels = start + self._headers
        shape = RingShape(
            head=self._head,
            written_at=self._head + 8,
            tails=self._tails[0],
            stride=_LINE,
            num_readers=self.num_readers,
            labels=labels,
            content=labels + _SLOT.size * self.num_slots,
            num_slots=self.num_slots,
            slot_bytes=self.slot_bytes,
        )
        self._native = NativeRing(self._words.path, shape) if isinstance(self._words, NativeWords) else None
        self.content = memoryview(self._map)[self._headers + _SLOT.size * self.num_slots :]

    @staticmethod
    def create(num_slots: int, slot_bytes: int, num_readers: int, *, first: int = 0) -> int:
        """A descriptor of a new ring, not inherited unless it is passed on. ``first``: the count that it begins with. Raises
        ValueError for sizes that cannot be: slots are a power of two.
        """
        if num_slots < 1 or num_slots & (num_slots - 1):
            raise ValueError(f"a ring has {num_slots} slots; it takes a power of two")
        if slot_bytes < 1 or not 1 <= num_readers <= MAX_READERS:
            raise ValueError(
                f"a ring has slots of {slot_bytes} bytes and {num_readers} readers; 1 to {MAX_READERS} read"
            )
        descriptor = os.memfd_create("penstock-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, _size(num_slots, slot_bytes, num_readers))
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            os.pwrite(descriptor, _SHAPE.pack(_MAGIC, num_slots, slot_bytes, num_readers), 0)
            for line in range(1 + num_readers):
                os.pwrite(descriptor, struct.pack("=I", (first & MASK) * STEP), (1 + line) * _LINE)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def written(self) -> tuple[int, bool]:
        """Slots that were written in all, modulo ``MASK + 1``, and whether the writer has ended."""
        word = self._words.load(self._head)
        return word // STEP, bool(word & CLOSED)

    def read(self, reader: int) -> tuple[int, bool]:
        """Slots that a reader has done with, and whether it has ended."""
        word = self._words.load(self._tails[reader])
        return word // STEP, bool(word & CLOSED)

    def add_written(self, slots: int) -> None:
        """Let the readers have the next slots."""
        self._words.add(self._head, slots, self._readers_asleep)

    def put(self, number: int, message: bytes) -> bool:
        """Write a message into one slot, and let the readers have it. False where that cannot be done at once, or not here."""
        return self._native is not None and self._native.put(number, message)

    def inbox(self, reader: int, *, is_early: bool) -> NativeInbox | None:
        """Where a reader gets messages of one slot; None where it must look for them itself. ``is_early``: it wants to be up
        before a message is due.
        """
        return None if self._native is None else self._native.inbox(reader, is_early=is_early)

    def add_read(self, reader: int, slots: int) -> None:
        """Let the writer have what a reader has done with."""
        self._words.add(self._tails[reader], slots, self._writer_asleep)

    def wait_written(self, seen: int, reader: int, deadline: float | None) -> bool:
        """Wait for more than ``seen`` slots or the writer's end. False at the deadline."""
        return self._words.wait(self._head, seen * STEP, self._tails[reader] + 4, deadline)

    def wait_read(self, seen: int, reader: int, deadline: float | None) -> bool:
        """Wait until a reader has done with more than ``seen`` slots, or has ended. False at the deadline."""
        return self._words.wait(self._tails[reader], seen * STEP, self._head + 4, deadline)

    def close_writer(self) -> None:
        """Nothing will be written any more. Idempotent."""
        self._words.close(self._head, self._readers_asleep)

    def close_reader(self, reader: int) -> None:
        """That reader will not read any more. Idempotent."""
        self._words.close(self._tails[reader], self._writer_asleep)

    def label(self, slot: int, number: int, left: int) -> None:
        """Say of a slot which message lies in it, and how many of its bytes are there and in the slots behind."""
        _SLOT.pack_into(self._map, self._headers + slot * _SLOT.size, number, left)

    def label_of(self, slot: int) -> tuple[int, int]:
        """What ``label`` said."""
        number, left = _SLOT.unpack_from(self._map, self._headers + slot * _SLOT.size)
        return number, left


def _size(num_slots: int, slot_bytes: int, num_readers: int) -> int:
    return (2 + num_readers) * _LINE + num_slots * (_SLOT.size + slot_bytes)
