"""The ring: whatever its ends do, a message that is read is the next one that was written, whole."""

import ctypes
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock_enginecore.executor.multiproc import futex_counter as words_module
from penstock_enginecore.executor.multiproc.futex_counter import NativeWords, PlainWords, Words, shared_words
from penstock_enginecore.executor.multiproc.ring import (
    MASK,
    RingClosed,
    RingError,
    RingMemory,
    RingReader,
    RingTimeout,
    RingWriter,
)
from tests.fakes.patience import PATIENCE

SLOT = 8
KINDS = {"native": NativeWords, "plain": PlainWords}


@pytest.fixture(params=KINDS)
def words(request: pytest.FixtureRequest) -> Words:
    return KINDS[request.param]()


def make_ring(
    words: Words, *, num_slots: int = 4, num_readers: int = 1, first: int = 0
) -> tuple[RingWriter, list[RingReader]]:
    descriptor = RingMemory.create(num_slots, SLOT, num_readers, first=first)
    try:
        # Each reader has a separate mapping, like a process.
        readers = [RingReader(RingMemory(descriptor, words), index) for index in range(num_readers)]
        return RingWriter(RingMemory(descriptor, words)), readers
    finally:
        os.close(descriptor)


@contextmanager
def _thread(call: Callable[[], Any]) -> Iterator[Future[Any]]:
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(call)


class RingMachine(RuleBasedStateMachine):
    """A writer and readers that write, read, fall behind, start late and end, compared with the expected messages."""

    kind: type[Words]

    @initialize(
        readers=st.integers(1, 3),
        log2_slots=st.integers(0, 5),
        before_the_end=st.integers(0, 40),
    )
    def begin(self, readers: int, log2_slots: int, before_the_end: int) -> None:
        self.num_slots = 2**log2_slots
        # The counters start just below the wrap-around to zero.
        self.writer, self.readers = make_ring(
            self.kind(), num_slots=self.num_slots, num_readers=readers, first=MASK - before_the_end
        )
        self.due: list[deque[bytes]] = [deque() for _ in self.readers]
        self.ended = [False] * readers
        self.writer_ended = False
        self.count = 0

    def slots_of(self, message: bytes) -> int:
        return max(1, -(-len(message) // SLOT))

    @rule(size=st.integers(0, 20 * SLOT))
    def write(self, size: int) -> None:
        self.count += 1
        message = (b"%d," % self.count * size)[:size]
        slots = self.slots_of(message)
        if slots > self.num_slots:
            return  # this case needs concurrent readers
        expected: type[Exception] | None = RingClosed if self.writer_ended else None
        for due, ended in zip(self.due, self.ended, strict=True):
            taken = sum(map(self.slots_of, due))
            if expected is None and ended:
                expected = RingClosed
            if expected is None and taken + slots > self.num_slots:
                expected = RingTimeout
        if expected is not None:
            with pytest.raises(expected):
                self.writer.write(message, timeout=0)
            return
        self.writer.write(message, timeout=0)
        for due in self.due:
            due.append(message)

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.readers) - 1))
        reader, due = self.readers[index], self.due[index]
        if self.ended[index] or (not due and self.writer_ended):
            with pytest.raises(RingClosed):
                reader.read(timeout=0)
        elif not due:
            with pytest.raises(RingTimeout):
                reader.read(timeout=0)
        else:
            assert reader.read(timeout=0) == due.popleft()

    @precondition(lambda self: self.count > 5)
    @rule(data=st.data(), told_by_another=st.booleans())
    def end_a_reader(self, data: st.DataObject, told_by_another: bool) -> None:
        index = data.draw(st.integers(0, len(self.readers) - 1))
        if told_by_another:
            self.writer._memory.close_reader(index)
        else:
            self.readers[index].close()
        self.ended[index] = True

    @precondition(lambda self: self.count > 5)
    @rule(told_by_another=st.booleans())
    def end_the_writer(self, told_by_another: bool) -> None:
        if told_by_another:
            self.readers[0]._memory.close_writer()
        else:
            self.writer.close()
        self.writer_ended = True

    @invariant()
    def nothing_is_counted_twice(self) -> None:
        if not hasattr(self, "due"):
            return
        written, _ = self.writer._memory.written()
        for index, due in enumerate(self.due):
            read, _ = self.writer._memory.read(index)
            assert (written - read) & MASK == sum(map(self.slots_of, due))


class NativeRing(RingMachine):
    kind = NativeWords


class PlainRing(RingMachine):
    kind = PlainWords


TestNativeRing = NativeRing.TestCase
TestPlainRing = PlainRing.TestCase
for case in (TestNativeRing, TestPlainRing):
    case.settings = settings(
        max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )


def test_a_writer_names_the_reader_that_it_waited_for(words: Words) -> None:
    writer, (first, _) = make_ring(words, num_readers=2)
    writer.write(b"x" * 3 * SLOT, timeout=0)
    first.read(timeout=0)
    with pytest.raises(RingTimeout, match="reader 1 of the ring is 3 slots behind"):
        writer.write(b"y" * 2 * SLOT, timeout=0)


def test_a_write_that_timed_out_has_written_nothing_and_can_be_made_again(words: Words) -> None:
    writer, (reader,) = make_ring(words)
    writer.write(b"a" * 4 * SLOT, timeout=0)
    with pytest.raises(RingTimeout):
        writer.write(b"b", timeout=0.001)
    assert reader.read(timeout=0) == b"a" * 4 * SLOT
    writer.write(b"b", timeout=0)
    assert reader.read(timeout=0) == b"b"


def test_a_message_longer_than_the_ring_that_nobody_reads_closes_it(words: Words) -> None:
    writer, (reader,) = make_ring(words)
    with pytest.raises(RingTimeout):
        writer.write(b"x" * 5 * SLOT, timeout=0)
    with pytest.raises(RingClosed, match="in the middle of a message"):
        reader.read(timeout=0)
    with pytest.raises(RingClosed):
        writer.write(b"y", timeout=0)


def test_a_waiting_reader_is_woken_by_a_message(words: Words) -> None:
    writer, (reader,) = make_ring(words)
    with _thread(reader.read) as reading:
        writer.write(b"x")
        assert reading.result(PATIENCE) == b"x"


def test_a_writer_waiting_for_room_is_woken_by_a_reader(words: Words) -> None:
    writer, (reader,) = make_ring(words)
    message = bytes(range(256)) * 10  # 80 times the size of the ring
    with _thread(lambda: writer.write(message)) as writing:
        assert reader.read(PATIENCE) == message
        writing.result(PATIENCE)


@pytest.mark.parametrize("told_by_another", [False, True])
def test_a_waiting_end_is_woken_by_the_end_of_the_other_side(words: Words, told_by_another: bool) -> None:
    writer, (reader,) = make_ring(words)
    with _thread(reader.read) as reading:
        (reader._memory.close_writer if told_by_another else writer.close)()
        with pytest.raises(RingClosed, match="the writer of the ring has ended"):
            reading.result(PATIENCE)
    writer, (reader,) = make_ring(words)
    writer.write(b"x" * 4 * SLOT)
    with _thread(lambda: writer.write(b"y")) as writing:
        (reader.close if not told_by_another else lambda: writer._memory.close_reader(0))()
        with pytest.raises(RingClosed, match="reader 0 of the ring has ended"):
            writing.result(PATIENCE)


def test_a_reader_that_is_closed_by_another_thread_stops_waiting(words: Words) -> None:
    writer, (reader,) = make_ring(words)
    with _thread(reader.read) as reading:
        writer.close()
        reader.close()
        with pytest.raises(RingClosed):
            reading.result(PATIENCE)


def test_what_nobody_wrote_is_found_out(words: Words) -> None:
    writer, (reader,) = make_ring(words)
    writer.write(b"x", timeout=0)
    writer._memory.label(0, 7, 1)
    with pytest.raises(RingError, match="message 7 with 1 bytes left, but the reader expected message 0"):
        reader.read(timeout=0)


@pytest.mark.parametrize(
    ("shape", "words_of_error"),
    [
        ((3, 8, 1), "num_slots is 3; it must be a power of two"),
        ((4, 8, 65), "num_readers is 65"),
        ((4, 0, 1), "slot_bytes is 0"),
    ],
)
def test_a_ring_that_cannot_be_is_refused(shape: tuple[int, int, int], words_of_error: str) -> None:
    with pytest.raises(ValueError, match=words_of_error):
        RingMemory.create(*shape)


def test_other_memory_is_no_ring() -> None:
    descriptor = os.memfd_create("other")
    try:
        with pytest.raises(ValueError, match="its size is 0 bytes"):
            RingMemory(descriptor)
        os.ftruncate(descriptor, 4096)
        with pytest.raises(ValueError, match="not the memory of a ring buffer in this version's format"):
            RingMemory(descriptor)
    finally:
        os.close(descriptor)


def test_a_reader_that_the_ring_does_not_have_is_refused(words: Words) -> None:
    descriptor = RingMemory.create(4, SLOT, 2)
    with pytest.raises(ValueError, match="reader index 2 is invalid: the ring buffer has 2 readers"):
        RingReader(RingMemory(descriptor, words), 2)
    os.close(descriptor)


def test_without_the_library_the_system_calls_are_made_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    shared_words.cache_clear()
    assert isinstance(shared_words(), NativeWords)
    shared_words.cache_clear()

    def missing() -> NativeWords:
        raise OSError("no such library")

    monkeypatch.setattr(words_module, "NativeWords", missing)
    try:
        assert isinstance(shared_words(), PlainWords)
    finally:
        shared_words.cache_clear()


def even_rhythm(reader: RingReader, *intervals: int) -> None:
    """Pretend that messages arrived at ``intervals`` (nanoseconds), the last one now."""
    assert reader._inbox is not None
    rhythm = reader._inbox._rhythm
    rhythm.last, rhythm.count = time.monotonic_ns(), len(rhythm.intervals)
    for index in range(len(rhythm.intervals)):
        rhythm.intervals[index] = intervals[index % len(intervals)]


def read_asleep(writer: RingWriter, reader: RingReader, message: bytes) -> None:
    """Write a message that the reader waits for."""
    asleep = ctypes.c_uint32.from_address(reader._memory._tails[0] + 4)
    with _thread(reader.read) as reading:
        while not asleep.value:
            assert not reading.done()
        writer.write(message)
        assert reading.result(PATIENCE) == message


def rehearsing_ring(rehearse: Callable[[bytes], object]) -> tuple[RingWriter, RingReader]:
    descriptor = RingMemory.create(4, SLOT, 1)
    try:
        return RingWriter(RingMemory(descriptor)), RingReader(RingMemory(descriptor), rehearse=rehearse)
    finally:
        os.close(descriptor)


def test_a_reader_rehearses_before_a_message_is_due_and_gets_it() -> None:
    rehearsed: list[bytes] = []

    def rehearse(message: bytes) -> None:
        rehearsed.append(message)
        writer.write(b"second")

    writer, reader = rehearsing_ring(rehearse)
    read_asleep(writer, reader, b"first")
    writer.write(b"beside")
    assert reader.read(PATIENCE) == b"beside"
    while not rehearsed:  # repeat, because a delayed thread may be too late
        even_rhythm(reader, 30_000_000)
        with suppress(RingTimeout):
            assert reader.read(timeout=0.1) == b"second"
    assert rehearsed == [b"first"]
    with pytest.raises(RingTimeout):  # the message is no longer expected soon
        reader.read(timeout=0)


def test_a_message_that_does_not_come_when_it_is_due_is_waited_for_asleep() -> None:
    rehearsed: list[bytes] = []
    writer, reader = rehearsing_ring(rehearsed.append)
    read_asleep(writer, reader, b"first")
    while not rehearsed:
        even_rhythm(reader, 30_000_000)
        with pytest.raises(RingTimeout):
            reader.read(timeout=0.06)
    assert rehearsed == [b"first"]
    with _thread(reader.read) as reading:
        writer.write(b"second")
        assert reading.result(PATIENCE) == b"second"
    assert rehearsed == [b"first"]


def test_nothing_is_rehearsed_where_messages_come_at_no_even_intervals() -> None:
    rehearsed: list[bytes] = []
    writer, reader = rehearsing_ring(rehearsed.append)
    read_asleep(writer, reader, b"first")
    even_rhythm(reader, 20_000_000, 30_000_000)
    with pytest.raises(RingTimeout):
        reader.read(timeout=0.05)
    assert rehearsed == []
