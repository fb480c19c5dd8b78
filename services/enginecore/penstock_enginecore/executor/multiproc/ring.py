"""Ring buffer for messages from one process to several other processes, in shared memory. Each reader gets every
message, in order.

The design follows vLLM's message queue in shared memory and LMAX's Disruptor: one writer, and counters instead of
locks. A waiting process sleeps after a short spin. A message may use any number of slots, even more slots than the ring
has.
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

# Functions of the C++ library (``csrc/ring.cpp``) for messages that fit into one slot. One function writes a message,
# one function waits for a message, and one function reads a message.
#
# A worker sleeps during most of a step, so its code is in no CPU cache when a message arrives. Therefore fewer
# instructions mean less latency.

_SOON = -1
_INTERVALS = 16


class RingShape(ctypes.Structure):
    """Addresses and sizes of a ring's memory: the struct ``Ring`` in the library."""

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
    """Functions of the library. The function that waits releases the interpreter lock."""

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
    """Ring on which the C++ library operates. The ring's memory must stay mapped while this object exists."""

    def __init__(self, path: Path, shape: RingShape) -> None:
        """Load the C++ library at ``path``."""
        self._calls = _calls(path)
        self._shape = shape
        self._address = ctypes.addressof(shape)

    def put(self, number: int, message: bytes) -> bool:
        return bool(self._calls.put(self._address, number, message, len(message)))

    def inbox(self, reader: int, *, is_early: bool) -> "NativeInbox":
        """Return the object with which reader ``reader`` receives messages of one slot."""
        return NativeInbox(self._calls, self._shape, reader, is_early=is_early)


class NativeInbox:
    """Messages for one reader of a ring."""

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
        """Return message ``number``, or None if this message has not arrived or uses several slots."""
        length = self._take(self._ring, self._reader, number, self._beat, self._to)
        if length < 0:
            return None
        return self._view[:length].tobytes()

    def wait(self, seen: int, deadline: float | None, *, is_soon: bool = False) -> bool | None:
        """Wait until more than ``seen`` slots are written, or the writer has ended. Returns False at ``deadline``.

        If the reader is early, returns None shortly before the next message is due, unless ``is_soon`` is true. The
        caller then prepares for the message and waits again.
        """
        until, spin = (-1 if deadline is None else int(deadline * 1e9)), self._spin
        while code := self._wait(self._ring, self._reader, seen * STEP, self._beat, is_soon, spin, until):
            if code == _SOON:
                return None
            if code == errno.ETIMEDOUT:
                return False
            if code != errno.EINTR:
                raise OSError(code, f"cannot wait on a futex: {os.strerror(code)}")
            spin = 0  # Python runs the signal's handler between two calls.
        return True


# Memory of a ring: its layout, and the operations of its writer and readers.

MASK = 2**31 - 1
"""Bit mask for numbers of slots, which are counted modulo ``MASK + 1``."""
MAX_READERS = 64

_MAGIC = b"penring1"
_SHAPE = struct.Struct("=8sIII")
_SLOT = struct.Struct("=QQ")
_LINE = 128
"""Distance in bytes between words that different processes write: two cache lines, because processors fetch cache lines
in pairs.
"""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class RingMemory:
    """Memory of a ring: mapped anonymous shared memory. The memory does not depend on ``/dev/shm``, and is freed when
    the last process that maps it ends.

    Layout, in lines of ``_LINE`` bytes:

    - The first line has the ring's shape.
    - The second line has the writer's counter (slots written), and the time of the last message that used one slot.
    - Each reader has one line with its counter (slots read).
    - Each slot has a label: the number of its message, and the size in bytes of the rest of the message, from this slot
      on.
    - The bytes of all slots are contiguous, so that a message is in one piece unless it wraps around.

    Next to each counter is a word that says whether the process that advances the counter sleeps.

    Any process may call ``close_writer`` and ``close_reader`` on behalf of a process that has ended.
    """

    def __init__(self, descriptor: int, words: Words | None = None) -> None:
        """Map a ring that ``create`` made, in any process. Raises ValueError if ``descriptor`` is not the descriptor of
        a ring.
        """
        self._words = words or shared_words()
        size = os.fstat(descriptor).st_size
        if size < _LINE:
            raise ValueError(f"descriptor {descriptor} is not the memory of a ring buffer: its size is {size} bytes")
        self._map = mmap.mmap(descriptor, size)
        self.num_slots: int
        self.slot_bytes: int
        self.num_readers: int
        magic, self.num_slots, self.slot_bytes, self.num_readers = _SHAPE.unpack_from(self._map)
        if magic != _MAGIC or size != _size(self.num_slots, self.slot_bytes, self.num_readers):
            raise ValueError(f"descriptor {descriptor} is not the memory of a ring buffer in this version's format")
        self._pinned = ctypes.c_char.from_buffer(self._map)  # keeps the mapping alive
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
        """Return the descriptor of a new ring. A child process inherits the descriptor only if the descriptor is passed
        explicitly.

        Args:
            num_slots: Number of slots, a power of two.
            slot_bytes: Size of a slot in bytes.
            num_readers: Number of readers, 1 to 64.
            first: Initial value of the slot counters.

        Raises:
            ValueError: A size is invalid.
        """
        if num_slots < 1 or num_slots & (num_slots - 1):
            raise ValueError(f"num_slots is {num_slots}; it must be a power of two")
        if slot_bytes < 1 or not 1 <= num_readers <= MAX_READERS:
            raise ValueError(
                f"slot_bytes is {slot_bytes} and num_readers is {num_readers}; slot_bytes must be at least 1, and num_readers "
                f"must be from 1 to {MAX_READERS}"
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
        """Return the number of slots that the writer has written, modulo ``MASK + 1``, and whether the writer has
        ended.
        """
        word = self._words.load(self._head)
        return word // STEP, bool(word & CLOSED)

    def read(self, reader: int) -> tuple[int, bool]:
        """Return the number of slots that a reader has read, modulo ``MASK + 1``, and whether the reader has ended."""
        word = self._words.load(self._tails[reader])
        return word // STEP, bool(word & CLOSED)

    def add_written(self, slots: int) -> None:
        """Publish the next ``slots`` slots, which the writer has written, to the readers."""
        self._words.add(self._head, slots, self._readers_asleep)

    def put(self, number: int, message: bytes) -> bool:
        """Write a message into one slot and publish the slot. Returns False if no slot is free, if the message needs
        several slots, or if there is no C++ library.
        """
        return self._native is not None and self._native.put(number, message)

    def inbox(self, reader: int, *, is_early: bool) -> NativeInbox | None:
        """Return the object with which a reader receives messages of one slot, or None if there is no C++ library.

        If ``is_early`` is true, the reader wakes up shortly before a message is due.
        """
        return None if self._native is None else self._native.inbox(reader, is_early=is_early)

    def add_read(self, reader: int, slots: int) -> None:
        """Mark the next ``slots`` slots as read by a reader, so that the writer can reuse these slots."""
        self._words.add(self._tails[reader], slots, self._writer_asleep)

    def wait_written(self, seen: int, reader: int, deadline: float | None) -> bool:
        """Wait until more than ``seen`` slots are written, or the writer has ended. Returns False at ``deadline``."""
        return self._words.wait(self._head, seen * STEP, self._tails[reader] + 4, deadline)

    def wait_read(self, seen: int, reader: int, deadline: float | None) -> bool:
        """Wait until a reader has read more than ``seen`` slots or has ended. Returns True, or False at ``deadline``."""
        return self._words.wait(self._tails[reader], seen * STEP, self._head + 4, deadline)

    def close_writer(self) -> None:
        """Mark the writer as ended. Idempotent."""
        self._words.close(self._head, self._readers_asleep)

    def close_reader(self, reader: int) -> None:
        """Mark a reader as ended. Idempotent."""
        self._words.close(self._tails[reader], self._writer_asleep)

    def label(self, slot: int, number: int, left: int) -> None:
        """Write a slot's label: the number of its message, and the size in bytes of the rest of the message, from this
        slot on.
        """
        _SLOT.pack_into(self._map, self._headers + slot * _SLOT.size, number, left)

    def label_of(self, slot: int) -> tuple[int, int]:
        """Return a slot's label, see ``label``."""
        number, left = _SLOT.unpack_from(self._map, self._headers + slot * _SLOT.size)
        return number, left


def _size(num_slots: int, slot_bytes: int, num_readers: int) -> int:
    return (2 + num_readers) * _LINE + num_slots * (_SLOT.size + slot_bytes)


Rehearse = Callable[[bytes], object]


class RingClosed(PenstockError):  # noqa: N818 - it says what happened
    """Raised if the other process of the ring has ended, or if this process has closed its end of the ring."""


class RingTimeout(PenstockError):  # noqa: N818
    """Raised if a read or write ended at its timeout, because the other process of the ring did not write or read slots in
    time. The caller may repeat the read or write.
    """


class RingError(PenstockError):
    """Raised when the ring contains data that its writer did not write."""


class RingWriter:
    """Writes messages to a ring. Only one thread at a time may write. ``close`` may be called on any thread."""

    def __init__(self, memory: RingMemory) -> None:
        self._memory = memory
        self._number = 0

    def write(self, message: bytes, timeout: float | None = None) -> None:
        """Write a message. Waits up to ``timeout`` seconds for the slowest reader, or without a limit if ``timeout`` is
        None.

        If the timeout ends during a message that is longer than the ring, the ring is closed, because readers may have
        read a part of the message.

        Raises:
            RingTimeout: A reader did not read slots before the timeout. If the message fits into the ring, nothing was
                written.
            RingClosed: A reader has ended.
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
        """End writing. Readers get the remaining messages, and then RingClosed. Idempotent."""
        self._memory.close_writer()

    def _wait_for_room(self, slots: int, deadline: float | None) -> int:
        """Wait until at least ``slots`` slots are free. Returns the number of free slots."""
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
        """Write the slots ``done`` to ``done + count`` of a message. The ring must have ``count`` free slots."""
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
    """Reads messages from a ring. Only one thread at a time may read. ``close`` may be called on any thread."""

    def __init__(self, memory: RingMemory, index: int = 0, rehearse: Rehearse | None = None) -> None:
        """Create the reader with index ``index``. Raises ValueError if the ring has no reader with this index.

        Shortly before the next message is due, the reader calls ``rehearse`` with the last message for which the reader
        had to wait. The call of ``rehearse`` loads the code that handles such a message into the processor's caches.
        """
        if not 0 <= index < memory.num_readers:
            raise ValueError(f"reader index {index} is invalid: the ring buffer has {memory.num_readers} readers")
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
        """Return the next message. Waits up to ``timeout`` seconds, or without a limit if ``timeout`` is None.

        Raises:
            RingTimeout: No message arrived before the timeout.
            RingClosed: The writer has ended and all its messages were read, or this reader was closed.
            RingError: The ring contains invalid data.
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
        """End reading. The writer then gets RingClosed. Idempotent."""
        self._memory.close_reader(self._index)

    def _available(self) -> int:
        """Return the number of slots that can be read now. Raises RingClosed if no slot can be read and the writer has
        ended.
        """
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
        """Wait until a slot is written, the writer has ended, or a message is due soon. Raises RingTimeout at the
        deadline.
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
            return  # The caller calls this method again, just as after the arrival of a message.
        self._is_soon = False
        if not here:
            raise RingTimeout("nothing was written to the ring")

    def _take(self, available: int) -> bytes | bytearray | None:
        """Read the available slots of one message. Returns the message, or None if more slots of the message must be
        read.
        """
        memory, size = self._memory, self._memory.slot_bytes
        read, _ = memory.read(self._index)
        first = read % memory.num_slots
        left = self._left if self._part is not None else memory.label_of(first)[1]
        count = min(available, max(1, -(-left // size)))
        for index in range(count):
            label = memory.label_of((first + index) % memory.num_slots)
            if label != (self._number, left - index * size):
                raise RingError(
                    f"a slot has a part of message {label[0]} with {label[1]} bytes left, but the reader expected "
                    f"message {self._number}"
                )
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


# Numbers and sizes of slots of the rings between an engine and its workers.


class Shape(NamedTuple):
    """Number and size of a ring's slots. A message that fits into the ring is read at once. A longer message is read in
    parts.
    """

    num_slots: int
    slot_bytes: int

    def create(self, num_readers: int) -> int:
        """Return the descriptor of a new ring."""
        return RingMemory.create(self.num_slots, self.slot_bytes, num_readers)


CALLS = Shape(64, 16 * 1024)
"""Shape of the ring from the engine to its workers. The message for a step of 64 requests uses one slot."""
ANSWERS = Shape(64, 4 * 1024)
"""Shape of the ring from one worker to the engine."""
