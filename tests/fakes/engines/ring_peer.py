"""Other end of a ring buffer as a process: ``python -m tests.fakes.engines.ring_peer`` with numbers of descriptors.

Message i is known in advance, so that the process detects lost, damaged and reordered messages.
"""

import random
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

from penstock_enginecore.executor.multiproc.futex_counter import NativeWords, PlainWords
from penstock_enginecore.executor.multiproc.ring import RingClosed, RingMemory, RingReader, RingWriter

MAX_SLOTS = 20
_NOISE = random.Random(1).randbytes(1 << 20)


def message(number: int, slot_bytes: int) -> bytes:
    """Return message ``number``, of 1 byte to ``MAX_SLOTS`` slots: unique noise, with its number at both ends if it
    fits.
    """
    mixed = number * 2_654_435_761 % 2**32
    slots = (1, 1, 1, 1, 2, 3, 5, MAX_SLOTS)[mixed >> 29]
    size = 1 + mixed % (slots * slot_bytes)
    start = mixed % (len(_NOISE) - size)
    if size < 16:
        return _NOISE[start : start + size]
    stamp = struct.pack("=Q", number)
    return stamp + _NOISE[start : start + size - 16] + stamp


def messages(count: int, slot_bytes: int) -> Iterator[bytes]:
    """Yield the first ``count`` messages."""
    return (message(number, slot_bytes) for number in range(count))


def start_reader(
    ring: int, index: int, *, dies_after: int = 0, slow: float = 0.0, kind: str = "native"
) -> "subprocess.Popen[str]":
    """Start a process that reads until the writer closes the ring, and prints the number of messages. Its exit status
    is not 0 if a message was wrong.

    Args:
        dies_after: Number of messages after which it dies silently.
        slow: Fraction of messages after which it sleeps briefly.
    """
    arguments = map(str, ("read", ring, index, dies_after, slow, kind))
    return _start(ring, arguments)


def start_writer(ring: int, *, count: int, dies: bool = False, kind: str = "native") -> "subprocess.Popen[str]":
    """Start a process that writes ``count`` messages. If ``dies`` is set, it ends without closing the ring."""
    return _start(ring, map(str, ("write", ring, count, int(dies), 0.0, kind)))


def _start(ring: int, arguments: Iterator[str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.fakes.engines.ring_peer", *arguments]
    return subprocess.Popen(command, pass_fds=[ring], stdout=subprocess.PIPE, text=True)


def _read(memory: RingMemory, index: int, dies_after: int, slow: float) -> int:
    reader, pauses = RingReader(memory, index), random.Random(index)
    number = 0
    while True:
        try:
            got = reader.read()
        except RingClosed:
            print(number)
            return 0
        if got != message(number, memory.slot_bytes):
            print(f"message {number} is another", file=sys.stderr)
            return 1
        number += 1
        if number == dies_after:
            return 0
        if slow and pauses.random() < slow:
            time.sleep(pauses.random() / 500)


def _write(memory: RingMemory, count: int, dies: int) -> int:
    writer = RingWriter(memory)
    for each in messages(count, memory.slot_bytes):
        writer.write(each)
    if not dies:
        writer.close()
    return 0


def main(role: str, ring: int, first: int, second: int, slow: float, kind: str) -> int:
    """Run the reader or the writer. The exit code is 0 if no message was wrong."""
    memory = RingMemory(ring, {"native": NativeWords, "plain": PlainWords}[kind]())
    return _read(memory, first, second, slow) if role == "read" else _write(memory, first, second)


if __name__ == "__main__":
    role, ring, first, second, slow, kind = sys.argv[1:]
    sys.exit(main(role, int(ring), int(first), int(second), float(slow), kind))
