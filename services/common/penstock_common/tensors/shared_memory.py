"""Shared memory for tensors between processes of one host: single tensors, and an arena whose parts are used again and again."""

import contextlib
import fcntl
import hashlib
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from penstock_common.errors import FailedPrecondition, InvalidArgument, RequestFailed, ResourceExhausted, quoted
from penstock_common.observability.logging import get_logger
from penstock_common.tensors.chunks import MAX_TENSOR_BYTES, Buffer

ROOT = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is
UNREADABLE = "SHARED_MEMORY_UNREADABLE"
"""The reason for which a receiver refuses a segment that it cannot read: the tensor can be sent otherwise."""
KEPT_FOR = 60.0
"""Seconds after which a sender removes a segment that nobody has read."""
PAUSE = 60.0
"""Seconds in which no segment is tried behind one that could not be made."""
PROBE_BYTES = 16
"""Of a segment by which a sender proves that the other end reads its memory."""
_PREFIX = "penstock-"
_SEGMENT = re.compile(r"penstock-([0-9a-f]{32})-[0-9]{1,20}")
_LOCK = re.compile(r"penstock-([0-9a-f]{32})\.lock")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SegmentRef(NamedTuple):
    """How a message refers to a tensor in shared memory."""

    name: str
    size: int


def shared_memory_id(root: Path = ROOT) -> str:
    """Names the shared memory of this process: the same in two processes that see the same, and may read each other's. Empty
    where there is none that can be used.
    """
    try:
        boot_id = _BOOT_ID.read_text().strip()
        status = root.stat()
    except OSError:
        return ""
    if not stat.S_ISDIR(status.st_mode) or not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        return ""
    return f"{boot_id}:{status.st_dev}:{status.st_ino}:{os.geteuid()}"


def owner_of(incarnation: str) -> str:
    """What names of segments say of the process that makes them: 32 hexadecimal digits."""
    return hashlib.blake2b(incarnation.encode(), digest_size=16, person=b"penstock-owner").hexdigest()


class SegmentWriter:
    """Makes the segments of one process. All of them together have ``max_bytes`` at most.

    Holds the lock that says that the process lives. Nothing is made before the first segment is. Belongs to one thread.
    """

    def __init__(
        self,
        incarnation: str,
        *,
        root: Path = ROOT,
        max_bytes: int = MAX_TENSOR_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``incarnation``: changes with every start of the process."""
        self._owner = owner_of(incarnation)
        self._root = root
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock: int | None = None
        self._last = 0
        self._unread: dict[str, tuple[int, float]] = {}
        """By name, bytes and when it was made, the oldest first."""
        self.num_bytes = 0
        """Of segments that nobody is known to have read."""
        self._tried_again_at = -math.inf

    def write(self, data: Buffer) -> SegmentRef | None:
        """A segment with these bytes; None where there is no room for it, or none can be made: then it is sent otherwise."""
        if self.broken or not self.has_room(len(data)):
            return None
        try:
            if self._lock is None:
                remove_orphans(self._root)
                self._lock = lock_file(self._root / f"{_PREFIX}{self._owner}.lock")
            self._last += 1
            name = f"{_PREFIX}{self._owner}-{self._last}"
            self._fill(self._root / name, data)
        except OSError as e:
            get_logger().warning("shared memory cannot be written; tensors go in messages for a while", why=str(e))
            self._tried_again_at = self._clock() + PAUSE
            return None
        self._unread[name] = len(data), self._clock()
        self.num_bytes += len(data)
        return SegmentRef(name, len(data))

    def __contains__(self, name: str) -> bool:
        """Whether it is a segment that nobody is known to have read."""
        return name in self._unread

    def remove(self, name: str) -> None:
        """Remove a segment, if it is still there."""
        size, _ = self._unread.pop(name, (0, 0.0))
        self.num_bytes -= size
        unlink(self._root / name)

    def remove_old(self) -> None:
        """Forget segments that were read, and remove those that nobody has read for too long."""
        oldest = self._clock() - KEPT_FOR
        for name, (_, made) in list(self._unread.items()):
            if made < oldest or not (self._root / name).exists():
                self.remove(name)

    def close(self) -> None:
        """Remove every segment, and the lock. Idempotent."""
        for name in list(self._unread):
            self.remove(name)
        if self._lock is not None:
            unlink(self._root / f"{_PREFIX}{self._owner}.lock")
            os.close(self._lock)
            self._lock = None
        self._tried_again_at = math.inf

    @property
    def broken(self) -> bool:
        """Whether no segment could be made, so that none is tried now."""
        return self._clock() < self._tried_again_at

    def has_room(self, size: int) -> bool:
        """Whether so many bytes may be written now."""
        if self.num_bytes + size > self._max_bytes:
            self.remove_old()
        return self.num_bytes + size <= self._max_bytes

    def _fill(self, path: Path, data: Buffer) -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(file, left) :]
        except OSError:
            unlink(path)
            raise
        finally:
            os.close(file)


class SegmentReader:
    """Reads the segments that one other process makes. What it has read, and what is no good, it removes."""

    def __init__(self, incarnation: str, *, root: Path = ROOT, max_bytes: int = MAX_TENSOR_BYTES) -> None:
        """``incarnation``: the other's."""
        self._owner = owner_of(incarnation)
        self._root = root
        self._max_bytes = max_bytes

    def read(self, name: str, offset: int, size: int, *, field: str) -> bytearray:
        """The ``size`` bytes of a segment from ``offset`` on, with which it ends. Raises InvalidArgument for a name that is no
        segment's of the other process, or one of another size; ResourceExhausted for more than ``max_bytes``; FailedPrecondition,
        with reason UNREADABLE, for one that is not there or cannot be read.
        """
        match = _SEGMENT.fullmatch(name)
        if match is None or match[1] != self._owner:
            raise InvalidArgument(f"{field}.name is {quoted(name)}; it is no segment of this session's", field=field)
        if size > self._max_bytes:
            raise ResourceExhausted(f"{field}.size is {size}; the limit is {self._max_bytes} bytes", field=field)
        path = self._root / name
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as e:
            raise FailedPrecondition(
                f"{field}: the segment cannot be opened: {e.strerror}", field=field, reason=UNREADABLE
            ) from None
        try:
            return self._read(file, offset, size, field)
        finally:
            os.close(file)
            unlink(path)

    def prove(self, name: str) -> bytes:
        """What a probe holds, by which its sender knows that its segments are read here; empty where it is none, or cannot be
        read.
        """
        try:
            return bytes(self.read(name, 0, PROBE_BYTES, field="hello.shared_memory_probe"))
        except RequestFailed:
            return b""

    def discard(self, name: str) -> None:
        """Remove a segment that is not needed, if it is one of the other process."""
        match = _SEGMENT.fullmatch(name)
        if match is not None and match[1] == self._owner:
            unlink(self._root / name)

    def _read(self, file: int, offset: int, size: int, field: str) -> bytearray:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidArgument(f"{field}: the segment is no file", field=field)
        if status.st_uid != os.geteuid():
            raise InvalidArgument(f"{field}: the segment is another user's", field=field)
        if status.st_size != offset + size:
            raise InvalidArgument(
                f"{field}: the segment has {status.st_size} bytes; offset and size say {offset + size}", field=field
            )
        with _refused_unreadable(field, "segment"):
            return _read_at(file, offset, size, field, "segment")


@contextlib.contextmanager
def _refused_unreadable(field: str, of: str) -> Iterator[None]:
    """Raise FailedPrecondition with reason UNREADABLE if the segment or arena (``of``) cannot be opened or read."""
    try:
        yield
    except OSError as e:
        text = f"{field}: the {of} cannot be read: {e.strerror}"
        raise FailedPrecondition(text, field=field, reason=UNREADABLE) from None


def _read_at(file: int, offset: int, size: int, field: str, of: str) -> bytearray:
    """Return ``size`` bytes of a segment or arena (``of``). Raises OSError, and InvalidArgument if it ends before."""
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size and (count := os.preadv(file, [view[done:]], offset + done)):
        done += count
    if done < size:
        raise InvalidArgument(f"{field}: the {of} ends behind {done} of {size} bytes", field=field)
    return data


def remove_orphans(root: Path = ROOT) -> int:
    """Remove the segments of processes that have died. Returns how many there were."""
    try:
        names = [path.name for path in root.iterdir()]
    except OSError:
        return 0
    owners = {match[1] for name in names if (match := _SEGMENT.fullmatch(name) or _LOCK.fullmatch(name))}
    count = 0
    for owner in owners:
        path = root / f"{_PREFIX}{owner}.lock"
        try:
            lock = lock_file(path, wait=False)
        except OSError:  # its process lives, or is another user's
            continue
        for name in names:
            if (match := _SEGMENT.fullmatch(name)) is not None and match[1] == owner:
                unlink(root / name)
                count += 1
        unlink(path)
        os.close(lock)
    if count:
        get_logger().info("removed shared memory that processes had left", segments=count)
    return count


def lock_file(path: Path, *, wait: bool = True) -> int:
    """An open file that is locked, and is the one of this name. Raises OSError, BlockingIOError among them where another process
    has it; with ``wait`` one that only looks is waited for.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), path.lstat()):
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # somebody has removed it meanwhile


def unlink(path: Path) -> None:
    """Remove a file, if it is there and may be removed."""
    with contextlib.suppress(OSError):  # it is gone, or another user's, who removes it
        path.unlink()


# A piece of shared memory that a process takes at its start and gives parts of to others of its host, again and again.
#
# It is a file in ``/dev/shm`` of a fixed size, whose pages are taken at once: there is none that is missing later. Its owner
# holds a lock by which others see that it lives; who starts next on the host removes those without an owner (``remove_orphans``).
# Both ends copy: nothing that is read changes under its reader, and a reader cannot be ended by a file that was cut off.

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
        with _refused_unreadable(field, "arena"):
            if self._file < 0:
                self._file = self._open(field)
            return _read_at(self._file, offset, size, field, "arena")

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
