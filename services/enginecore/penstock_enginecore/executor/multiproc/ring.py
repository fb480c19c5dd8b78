"""Messages from one process to some others, each of which gets every message, in order.

The idea is that of vLLM's message queue in shared memory and of LMAX's Disruptor: one writer, counters instead of locks. Here
who waits sleeps after a moment, and a message may take any number of slots, more than the ring has.
"""

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from penstock_common.errors import PenstockError
from penstock_enginecore.executor.multiproc.futex_counter import (
    CLOSED,
    SPIN,
    STEP,
    NativeWords,
    Sleepers,
    Words,
    deadline_after,
    shared_words,
)

# Messages of one slot, by the library (``csrc/ring.cpp``): a call to write one, one to wait and one to read.
#
# A worker sleeps for most of a step, and what it does when a message comes is in no cache then: the fewer the steps on
# the way, the sooner the message is there.

_SOON = -1
_INTERVALS = 16


class RingShape(ctypes.Structure):
    """Where what is in a ring's memory, and its sizes: ``Ring`` of the library."""

    _fields_ = (
        ("head", ctypes.c_void_p),
        ("written_at", ctypes.c_void_p),
        ("tails", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("num_readers", ctypes.c_int64),
        ("labels", ctypes.c_void_p),
        ("content", ctypes.c_void_p),
        ("num_slots", ctypes.c_int64),
        ("slot_bytes", ctypes.c_int64),
    )


class _Rhythm(ctypes.Structure):
    _fields_ = (
        ("sleeps", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("intervals", ctypes.c_int64 * _INTERVALS),
    )


class _Calls:
    """The library's functions. Waiting releases the interpreter's lock."""

    def __init__(self, path: Path) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        holding, releasing = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        self.put, self.take, self.wait = (
            holding.penstock_ring_put,
            holding.penstock_ring_take,
            releasing.penstock_ring_wait,
        )
        self.put.argtypes, self.put.restype = (pointer, ctypes.c_uint64, ctypes.c_char_p, number), ctypes.c_int
        self.take.argtypes, self.take.restype = (pointer, number, ctypes.c_uint64, pointer, pointer), number
        self.wait.argtypes = (pointer, number, ctypes.c_uint32, pointer, ctypes.c_int, number, number)
        self.wait.restype = ctypes.c_int


_calls = functools.cache(_Calls)


class NativeRing:
    """A ring in memory that stays mapped for as long as this lives."""

    def __init__(self, path: Path, shape: RingShape) -> None:
        """``path``: of the library."""
        self._calls = _calls(path)
        self._shape = shape
        self._address = ctypes.addressof(shape)

    def put(self, number: int, message: bytes) -> bool:
        return bool(self._calls.put(self._address, number, message, len(message)))

    def inbox(self, reader: int, *, is_early: bool) -> "NativeInbox":
        """Return the inbox of one reader."""
        return NativeInbox(self._calls, self._shape, reader, is_early=is_early)


class NativeInbox:
    """What one reader of a ring gets."""

    def __init__(self, calls: _Calls, shape: RingShape, reader: int, *, is_early: bool) -> None:
        self._take, self._wait = calls.take, calls.wait
        self._shape = shape
        self._ring = ctypes.addressof(shape)
        self._reader = reader
        self._bytes = bytearray(shape.slot_bytes)
        self._view = memoryview(self._bytes)
        self._pinned = ctypes.c_char.from_buffer(self._bytes)
        self._to = ctypes.addressof(self._pinned)
        self._rhythm = _Rhythm()
        self._beat = ctypes.addressof(self._rhythm) if is_early else None
        self._spin = int(SPIN * 1e9)

    def take(self, number: int) -> bytes | None:
        """Message ``number``; None where it is not there, or not of one slot."""
        length = self._take(self._ring, self._reader, number, self._beat, self._to)
        if length < 0:
            return None
        return self._view[:length].tobytes()

    def wait(self, seen: int, deadline: float | None, *, is_soon: bool = False) -> bool | None:
        """Wait for more than ``seen`` slots or the writer's end; False at the deadline. Where the reader is to be early,
        None, unless ``is_soon``, when the next message is due in a moment: the caller gets ready for it, and waits again.
        """
        until, spin = (-1 if deadline is None else int(deadline * 1e9)), self._spin
        while code := self._wait(self._ring, self._reader, seen * STEP, self._beat, is_soon, spin, until):
            if code == _SOON:
                return None
            if code == errno.ETIMEDOUT:
                return False
            if code != errno.EINTR:
                raise OSError(code, f"a futex cannot be waited for: {os.strerror(code)}")
            spin = 0  # the signal's handler runs between two calls
        return True


# The memory of a ring: who may hold it, and where what lies in it.

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


Rehearse = Callable[[bytes], object]


class RingClosed(PenstockError):  # noqa: N818 - it says what happened
    """The other side has ended, or this one."""


class RingTimeout(PenstockError):  # noqa: N818
    """The other side was not as far in time. The call may be made again."""


class RingError(PenstockError):
    """What lies in the ring is not what was written: somebody else writes there."""


class RingWriter:
    """Writes messages, one thread at a time. ``close`` may be called by any thread."""

    def __init__(self, memory: RingMemory) -> None:
        self._memory = memory
        self._number = 0

    def write(self, message: bytes, timeout: float | None = None) -> None:
        """Write a message. Waits up to ``timeout`` seconds for the slowest reader, None for ever.

        Raises RingTimeout, when nothing is written, and RingClosed when a reader has ended. A message that is longer than the
        ring closes it where it times out: half of it was read.
        """
        memory = self._memory
        if memory.put(self._number, message):
            self._number += 1
            return
        deadline = deadline_after(timeout)
        slots = max(1, -(-len(message) // memory.slot_bytes))
        room = self._wait_for_room(min(slots, memory.num_slots), deadline)
        done = 0
        while done < slots:
            if not room:
                try:
                    room = self._wait_for_room(1, deadline)
                except RingTimeout:
                    self.close()
                    raise
            count = min(room, slots - done)
            self._put(message, done, count)
            done, room = done + count, 0
        self._number += 1

    def close(self) -> None:
        """Write nothing any more: readers get what there is, then RingClosed. Idempotent."""
        self._memory.close_writer()

    def _wait_for_room(self, slots: int, deadline: float | None) -> int:
        """The slots that are free, at least ``slots``."""
        memory = self._memory
        written, closed = memory.written()
        if closed:
            raise RingClosed("the ring is closed")
        room = memory.num_slots
        for reader in range(memory.num_readers):
            while True:
                read, closed = memory.read(reader)
                if closed:
                    raise RingClosed(f"reader {reader} of the ring has ended")
                free = memory.num_slots - (written - read & MASK)
                if free >= slots:
                    break
                if not memory.wait_read(read, reader, deadline):
                    raise RingTimeout(f"reader {reader} of the ring is {memory.num_slots - free} slots behind")
            room = min(room, free)
        return room

    def _put(self, message: bytes, done: int, count: int) -> None:
        """Write slots ``done`` to ``done + count`` of a message; all of them are free."""
        memory, size = self._memory, self._memory.slot_bytes
        written, _ = memory.written()
        first = written % memory.num_slots
        for index in range(count):
            left = len(message) - (done + index) * size
            memory.label((first + index) % memory.num_slots, self._number, left)
        start, before_end = done * size, min(count, memory.num_slots - first)
        middle, end = start + before_end * size, start + count * size
        _copy(memory.content, first * size, memoryview(message)[start:middle])
        _copy(memory.content, 0, memoryview(message)[middle:end])
        memory.add_written(count)


class RingReader:
    """Reads messages, one thread at a time. ``close`` may be called by any thread."""

    def __init__(self, memory: RingMemory, index: int = 0, rehearse: Rehearse | None = None) -> None:
        """``index``: which of the ring's readers this is. ``rehearse``: called with the last message that was waited for shortly
        before the next is due, where that can be known, so that what becomes of it is in the processor's caches. Raises
        ValueError where the ring has fewer readers.
        """
        if not 0 <= index < memory.num_readers:
            raise ValueError(f"reader {index} of a ring of {memory.num_readers}")
        self._memory = memory
        self._index = index
        self._number = 0
        self._part: bytearray | None = None
        self._left = 0
        self._inbox = memory.inbox(index, is_early=rehearse is not None)
        self._is_soon = False
        self._awaited = b""
        self._rehearse = rehearse

    def read(self, timeout: float | None = None) -> bytes | bytearray:
        """The next message. Waits up to ``timeout`` seconds, None for ever.

        Raises RingTimeout; RingClosed when the writer has ended and all that it wrote is read, or when this reader was closed;
        RingError for what nobody wrote.
        """
        deadline, inbox, waited = deadline_after(timeout), self._inbox, False
        while True:
            message: bytes | bytearray | None
            if inbox is not None and self._part is None and (taken := inbox.take(self._number)) is not None:
                message = taken
                if waited:
                    self._awaited = taken
            elif available := self._available():
                message = self._take(available)
            else:
                self._wait(deadline)
                waited = True
                continue
            if message is not None:
                self._number += 1
                self._is_soon = False
                return message

    def close(self) -> None:
        """Read nothing any more: the writer gets RingClosed. Idempotent."""
        self._memory.close_reader(self._index)

    def _available(self) -> int:
        """How many slots there are to read. Raises RingClosed where there will be none."""
        memory = self._memory
        read, closed = memory.read(self._index)
        if closed:
            raise RingClosed("the ring is closed")
        written, closed = memory.written()
        available = written - read & MASK
        if closed and not available:
            part = "" if self._part is None else ", in the middle of a message"
            raise RingClosed(f"the writer of the ring has ended{part}")
        return available

    def _wait(self, deadline: float | None) -> None:
        """Wait for a slot, the writer's end or the moment before either is due, where all that was written is read. Raises
        RingTimeout at the deadline.
        """
        memory, inbox = self._memory, self._inbox
        seen, _ = memory.read(self._index)
        if inbox is None:
            here: bool | None = memory.wait_written(seen, self._index, deadline)
        else:
            here = inbox.wait(seen, deadline, is_soon=self._is_soon)
        if here is None and self._rehearse is not None:
            self._is_soon = True
            self._rehearse(self._awaited)
            return  # by the way that it takes when the message is there
        self._is_soon = False
        if not here:
            raise RingTimeout("nothing was written to the ring")

    def _take(self, available: int) -> bytes | bytearray | None:
        """Read slots of one message; None unless they are its last."""
        memory, size = self._memory, self._memory.slot_bytes
        read, _ = memory.read(self._index)
        first = read % memory.num_slots
        left = self._left if self._part is not None else memory.label_of(first)[1]
        count = min(available, max(1, -(-left // size)))
        for index in range(count):
            label = memory.label_of((first + index) % memory.num_slots)
            if label != (self._number, left - index * size):
                raise RingError(f"message {label[0]} with {label[1]} bytes left where message {self._number} goes on")
        before_end = min(count, memory.num_slots - first)
        taken, straight = min(left, count * size), min(left, before_end * size)
        start = first * size
        if self._part is None and taken == straight == left:
            message = bytes(memory.content[start : start + left])
            memory.add_read(self._index, count)
            return message
        part = self._part = bytearray() if self._part is None else self._part
        part += memory.content[start : start + straight]
        part += memory.content[: taken - straight]
        memory.add_read(self._index, count)
        self._left = left - taken
        if self._left:
            return None
        self._part = None
        return part


def _copy(to: memoryview, start: int, content: memoryview) -> None:
    to[start : start + len(content)] = content


# The rings between an engine and its workers: their shapes.


class Shape(NamedTuple):
    """Slots and their bytes. A message is read in one piece while it fits; a longer one passes through."""

    num_slots: int
    slot_bytes: int

    def create(self, num_readers: int) -> int:
        """A descriptor of a new ring."""
        return RingMemory.create(self.num_slots, self.slot_bytes, num_readers)


CALLS = Shape(64, 16 * 1024)
"""From the engine to its workers: a step of 64 requests takes one slot."""
ANSWERS = Shape(64, 4 * 1024)
"""From one worker to the engine."""
