"""The ring between processes that are slow, late, or end without a word. ``make ring`` sends a million messages."""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from penstock_enginecore.executor.multiproc.ring import MASK, RingClosed, RingMemory, RingReader, RingWriter
from tests.fakes.engines.ring_peer import message, messages, start_reader, start_writer
from tests.fakes.patience import PATIENCE

COUNT = 3000
SLOT_BYTES = 64


@pytest.fixture
def ring() -> Iterator[int]:
    """Return a ring with fewer slots than the longest messages need. Its counters wrap around during the test."""
    descriptor = RingMemory.create(16, SLOT_BYTES, 2, first=MASK - COUNT)
    yield descriptor
    os.close(descriptor)


@contextmanager
def _told_at_the_end_of(process: "subprocess.Popen[str]", tell: Callable[[], None]) -> Iterator[None]:
    """Watch the process through its pidfd, as the engine does."""

    def wait() -> None:
        process.communicate(timeout=PATIENCE)
        tell()

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join(PATIENCE)
    assert process.returncode == 0


@pytest.mark.parametrize("kind", ["native", "plain"])
def test_slow_and_late_readers_get_every_message_whole_and_in_order(ring: int, kind: str) -> None:
    readers = [start_reader(ring, 0, kind=kind), start_reader(ring, 1, slow=0.02, kind=kind)]
    writer = RingWriter(RingMemory(ring))
    for each in messages(COUNT, SLOT_BYTES):  # long before the reader processes have started
        writer.write(each, PATIENCE)
    writer.close()
    assert [reader.communicate(timeout=PATIENCE)[0].strip() for reader in readers] == [str(COUNT)] * 2
    assert [reader.returncode for reader in readers] == [0, 0]


def test_a_reader_that_is_gone_ends_the_writing_once_somebody_says_so(ring: int) -> None:
    dying, living = start_reader(ring, 0, dies_after=COUNT // 2), start_reader(ring, 1)
    memory = RingMemory(ring)
    writer = RingWriter(memory)
    with _told_at_the_end_of(dying, lambda: memory.close_reader(0)), pytest.raises(RingClosed, match="reader 0"):
        for each in messages(COUNT, SLOT_BYTES):
            writer.write(each, PATIENCE)
    writer.close()
    read = int(living.communicate(timeout=PATIENCE)[0])
    assert COUNT // 2 <= read < COUNT
    assert living.returncode == 0


def test_a_writer_that_is_gone_ends_the_reading_behind_what_it_wrote() -> None:
    ring = RingMemory.create(16, SLOT_BYTES, 1)
    memory = RingMemory(ring)
    reader = RingReader(memory)
    dying = start_writer(ring, count=COUNT, dies=True)
    os.close(ring)
    with _told_at_the_end_of(dying, memory.close_writer):
        for number in range(COUNT):
            assert reader.read(PATIENCE) == message(number, SLOT_BYTES)
        with pytest.raises(RingClosed, match="the writer of the ring has ended"):
            reader.read(PATIENCE)
