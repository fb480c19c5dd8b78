"""Messages from one process to some others, each of which gets every message, in order.

The idea is that of vLLM's message queue in shared memory and of LMAX's Disruptor: one writer, counters instead of locks. Here
who waits sleeps after a moment, and a message may take any number of slots, more than the ring has.
"""

from collections.abc import Callable

from penstock_common.errors import PenstockError
from penstock_enginecore.executor.multiproc.futex_counter import deadline_after
from penstock_enginecore.executor.multiproc.ring_memory import MASK, RingMemory

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
