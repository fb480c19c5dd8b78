"""A piece of shared memory that a process takes at its start and gives parts of to others of its host, again and again.

It is a file in ``/dev/shm`` of a fixed size, whose pages are taken at once: there is none that is missing later. Its owner holds
a lock by which others see that it lives; who starts next on the host removes those without an owner (``remove_orphans``). Both
ends copy: nothing that is read changes under its reader, and a reader cannot be ended by a file that was cut off.
"""

import os
import stat
from pathlib import Path

from penstock_common.errors import FailedPrecondition, InvalidArgument, quoted
from penstock_common.tensors.shared_memory import ROOT, UNREADABLE, lock_file, owner_of, read_at, unlink
from penstock_common.tensors.sizes import Buffer

MAX_SLOTS = 65_536
"""Of an arena, however small they are."""
_PURPOSE = "arena:"
"""Sets the owner of an arena apart from that of the process's segments."""


class Arena:
    """Slots of ``slot_bytes`` each, together ``size`` bytes at most. Belongs to one thread. Raises OSError where memory is not
    to be had, and for less than a slot.
    """

    def __init__(self, incarnation: str, *, size: int, slot_bytes: int, root: Path = ROOT) -> None:
        """``incarnation``: changes with every start of the process."""
        count = min(size // slot_bytes, MAX_SLOTS)
        if not count:
            raise OSError(f"{size} bytes hold no slot of {slot_bytes}")
        owner = owner_of(_PURPOSE + incarnation)
        self.name = f"penstock-{owner}-0"
        self.slot_bytes = slot_bytes
        self._path, self._lock_path = root / self.name, root / f"penstock-{owner}.lock"
        self._free = list(range(count - 1, -1, -1))
        self._num_slots = count
        self._file = -1
        self._lock = lock_file(self._lock_path)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(self._path, flags, 0o600)
            os.posix_fallocate(self._file, 0, count * slot_bytes)
        except OSError:
            self.close()
            raise

    @property
    def num_used(self) -> int:
        """Slots that were taken and not given back."""
        return self._num_slots - len(self._free)

    def put(self, data: Buffer) -> int | None:
        """Take a slot for these bytes; returns where they begin, in bytes, or None where no slot is free. Raises ValueError for
        more bytes than a slot has, OSError where they cannot be written.
        """
        if len(data) > self.slot_bytes:
            raise ValueError(f"{len(data)} bytes do not fit into a slot of {self.slot_bytes}")
        if not self._free:
            return None
        offset = self._free[-1] * self.slot_bytes
        left, place = memoryview(data), offset
        while left:
            written = os.pwrite(self._file, left, place)
            left, place = left[written:], place + written
        self._free.pop()
        return offset

    def give_back(self, offset: int) -> None:
        """Nobody reads the slot at ``offset`` any more."""
        self._free.append(offset // self.slot_bytes)

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            unlink(self._path)
        if self._lock >= 0:
            unlink(self._lock_path)
            os.close(self._lock)
            self._lock = -1


class ArenaReader:
    """Copies out of the arena of one other process."""

    def __init__(self, incarnation: str, *, root: Path = ROOT) -> None:
        """``incarnation``: the other's."""
        self._name = f"penstock-{owner_of(_PURPOSE + incarnation)}-0"
        self._root = root
        self._file = -1

    def read(self, name: str, offset: int, size: int, *, field: str) -> bytearray:
        """The ``size`` bytes from ``offset`` on. Raises InvalidArgument for another name than the arena's and for bytes beyond
        its end; FailedPrecondition, with reason UNREADABLE, where it is not there or cannot be read.
        """
        if name != self._name:
            raise InvalidArgument(f"{field}.name is {quoted(name)}; it is not the arena of this stream", field=field)
        try:
            if self._file < 0:
                self._file = self._open(field)
            data, done = read_at(self._file, offset, size)
        except OSError as e:
            raise FailedPrecondition(
                f"{field}: the arena cannot be read: {e.strerror}", field=field, reason=UNREADABLE
            ) from None
        if done < size:
            raise InvalidArgument(f"{field}: the arena ends behind {done} of {size} bytes", field=field)
        return data

    def close(self) -> None:
        """Read no more. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self, field: str) -> int:
        file = os.open(self._root / self._name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(file)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            return file
        os.close(file)
        raise InvalidArgument(f"{field}: the arena is no file, or another user's", field=field)
