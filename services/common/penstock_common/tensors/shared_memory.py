"""Shared memory for tensors between processes of one host: single segments, and an arena with reusable slots."""

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

ROOT = Path("/dev/shm")  # noqa: S108 - mount point of POSIX shared memory
UNREADABLE = "SHARED_MEMORY_UNREADABLE"
"""Error reason if a receiver cannot read a segment. The sender can then send the tensor in another way."""
KEPT_FOR = 60.0
"""Seconds after which a sender removes a segment that was not read."""
PAUSE = 60.0
"""Seconds without a new attempt after the creation of a segment has failed."""
PROBE_BYTES = 16
"""Size in bytes of a probe: a segment with which a sender checks whether the other end can read its segments."""
_PREFIX = "penstock-"
_SEGMENT = re.compile(r"penstock-([0-9a-f]{32})-[0-9]{1,20}")
_LOCK = re.compile(r"penstock-([0-9a-f]{32})\.lock")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SegmentRef(NamedTuple):
    """A message's reference to a tensor in shared memory."""

    name: str
    size: int


def shared_memory_id(root: Path = ROOT) -> str:
    """Return an ID of this process's shared memory. Processes with the same ID can read each other's segments.

    Returns '' if there is no usable shared memory.
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
    """Return the 32 hexadecimal digits in segment names that identify the process with this incarnation."""
    return hashlib.blake2b(incarnation.encode(), digest_size=16, person=b"penstock-owner").hexdigest()


class SegmentWriter:
    """Writer of the segments of one process, with at most ``max_bytes`` in total. Use it in one thread only.

    The writer keeps a file lock, which shows other processes that this process is alive. The writer creates no file
    before the first segment.
    """

    def __init__(
        self,
        incarnation: str,
        *,
        root: Path = ROOT,
        max_bytes: int = MAX_TENSOR_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a writer. ``incarnation`` changes with every start of the process."""
        self._owner = owner_of(incarnation)
        self._root = root
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock: int | None = None
        self._last = 0
        self._unread: dict[str, tuple[int, float]] = {}
        """Size in bytes and creation time of unread segments, by name, oldest first."""
        self.num_bytes = 0
        """Total size in bytes of all segments, except segments that were certainly read."""
        self._tried_again_at = -math.inf

    def write(self, data: Buffer) -> SegmentRef | None:
        """Create a shared memory segment with these bytes.

        Returns None if the limit is reached or the creation fails. The caller then sends the tensor in another way.
        """
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
            get_logger().warning(
                "cannot write a tensor to shared memory; for 60 s, this process sends tensors in gRPC messages",
                reason=str(e),
            )
            self._tried_again_at = self._clock() + PAUSE
            return None
        self._unread[name] = len(data), self._clock()
        self.num_bytes += len(data)
        return SegmentRef(name, len(data))

    def __contains__(self, name: str) -> bool:
        """Return whether ``name`` is a segment that may not have been read yet."""
        return name in self._unread

    def remove(self, name: str) -> None:
        """Remove a segment if it still exists."""
        size, _ = self._unread.pop(name, (0, 0.0))
        self.num_bytes -= size
        unlink(self._root / name)

    def remove_old(self) -> None:
        """Forget segments that were read, and remove segments that were not read within KEPT_FOR seconds."""
        oldest = self._clock() - KEPT_FOR
        for name, (_, made) in list(self._unread.items()):
            if made < oldest or not (self._root / name).exists():
                self.remove(name)

    def close(self) -> None:
        """Remove every segment and the lock. Idempotent."""
        for name in list(self._unread):
            self.remove(name)
        if self._lock is not None:
            unlink(self._root / f"{_PREFIX}{self._owner}.lock")
            os.close(self._lock)
            self._lock = None
        self._tried_again_at = math.inf

    @property
    def broken(self) -> bool:
        """Whether the creation of a segment failed in the last PAUSE seconds, so that no attempt is made now."""
        return self._clock() < self._tried_again_at

    def has_room(self, size: int) -> bool:
        """Return whether a segment of ``size`` bytes may be created now."""
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
    """Reader of the segments of one other process. The reader removes each segment that it has read, and invalid
    segments.
    """

    def __init__(self, incarnation: str, *, root: Path = ROOT, max_bytes: int = MAX_TENSOR_BYTES) -> None:
        """Create a reader for the process with ``incarnation``."""
        self._owner = owner_of(incarnation)
        self._root = root
        self._max_bytes = max_bytes

    def read(self, name: str, offset: int, size: int, *, field: str) -> bytearray:
        """Return the ``size`` bytes of a segment from ``offset`` to its end.

        Raises:
            InvalidArgument: No segment of the other process can have this name, or the segment has another size.
            ResourceExhausted: ``size`` exceeds ``max_bytes``.
            FailedPrecondition: The segment does not exist or cannot be read (reason UNREADABLE).
        """
        match = _SEGMENT.fullmatch(name)
        if match is None or match[1] != self._owner:
            raise InvalidArgument(
                f"{field}.name is {quoted(name)}, which is not a segment of this session", field=field
            )
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
        """Return the content of a probe, or empty bytes if the probe cannot be read.

        The content proves to the sender of the probe that this process can read its segments.
        """
        try:
            return bytes(self.read(name, 0, PROBE_BYTES, field="hello.shared_memory_probe"))
        except RequestFailed:
            return b""

    def discard(self, name: str) -> None:
        """Remove a segment that is not needed, if it belongs to the other process."""
        match = _SEGMENT.fullmatch(name)
        if match is not None and match[1] == self._owner:
            unlink(self._root / name)

    def _read(self, file: int, offset: int, size: int, field: str) -> bytearray:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidArgument(f"{field}: the segment is not a regular file", field=field)
        if status.st_uid != os.geteuid():
            raise InvalidArgument(f"{field}: the segment belongs to another user", field=field)
        if status.st_size != offset + size:
            raise InvalidArgument(
                f"{field}: the segment has {status.st_size} bytes; offset and size require {offset + size} bytes",
                field=field,
            )
        with _refused_unreadable(field, "segment"):
            return _read_at(file, offset, size, field, "segment")


@contextlib.contextmanager
def _refused_unreadable(field: str, of: str) -> Iterator[None]:
    """Convert an OSError of the ``with`` block to FailedPrecondition, reason UNREADABLE. ``of`` is the word for the
    file in the error: segment or arena.
    """
    try:
        yield
    except OSError as e:
        text = f"{field}: the {of} cannot be read: {e.strerror}"
        raise FailedPrecondition(text, field=field, reason=UNREADABLE) from None


def _read_at(file: int, offset: int, size: int, field: str, of: str) -> bytearray:
    """Return ``size`` bytes, from ``offset`` on, of the file of a segment or arena. Raises OSError, and InvalidArgument
    if the file is too short.
    """
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size and (count := os.preadv(file, [view[done:]], offset + done)):
        done += count
    if done < size:
        raise InvalidArgument(f"{field}: the {of} ends after {done} of {size} bytes", field=field)
    return data


def remove_orphans(root: Path = ROOT) -> int:
    """Remove the segments of processes that have died. Returns the number of removed segments."""
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
        except OSError:  # the process is alive, or belongs to another user
            continue
        for name in names:
            if (match := _SEGMENT.fullmatch(name)) is not None and match[1] == owner:
                unlink(root / name)
                count += 1
        unlink(path)
        os.close(lock)
    if count:
        get_logger().info("removed shared memory of dead processes", segments=count)
    return count


def lock_file(path: Path, *, wait: bool = True) -> int:
    """Lock a file, and return its descriptor. When this function returns, the locked file still has the name ``path``.

    If another process has the lock, wait for it, or raise BlockingIOError if ``wait`` is False. Raises OSError for
    other failures.
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
        os.close(file)  # another process has removed the file meanwhile


def unlink(path: Path) -> None:
    """Remove a file if it exists and may be removed."""
    with contextlib.suppress(OSError):  # already removed, or it belongs to another user
        path.unlink()


# An arena: shared memory that a process allocates at startup. The process reuses the slots of the arena to send tensors
# to other processes on its host.
#
# The arena is a file in ``/dev/shm`` with a fixed size. All its pages are allocated at startup, so that memory cannot
# be missing later. The owner of the arena keeps a file lock, which shows that the owner is alive. A process that starts
# later removes arenas whose owner is dead (``remove_orphans``). Both ends copy the data. So the data does not change
# while it is used, and a truncated file cannot crash a reader.

MAX_SLOTS = 65_536
"""Maximum number of slots of an arena, regardless of the size of a slot."""
_PURPOSE = "arena:"
"""Prefix that makes the owner ID of an arena differ from the owner ID of the same process's segments."""


class Arena:
    """Arena with slots of ``slot_bytes`` bytes each, and at most ``size`` bytes in total. Use it in one thread only.

    Raises OSError if the memory is not available, or if ``size`` is less than one slot.
    """

    def __init__(self, incarnation: str, *, size: int, slot_bytes: int, root: Path = ROOT) -> None:
        """Allocate the arena. ``incarnation`` changes with every start of the process."""
        count = min(size // slot_bytes, MAX_SLOTS)
        if not count:
            raise OSError(f"an arena of {size} bytes has no space for a slot of {slot_bytes} bytes")
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
        """Number of occupied slots."""
        return self._num_slots - len(self._free)

    def put(self, data: Buffer | memoryview) -> int | None:
        """Write bytes into a free slot. Returns the slot's offset in bytes, or None if no slot is free.

        Raises ValueError if the bytes do not fit into a slot, OSError if they cannot be written.
        """
        if len(data) > self.slot_bytes:
            raise ValueError(f"{len(data)} bytes do not fit into a slot of {self.slot_bytes} bytes")
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
        """Free the slot at ``offset``."""
        self._free.append(offset // self.slot_bytes)

    def close(self) -> None:
        """Free the arena's shared memory. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            unlink(self._path)
        if self._lock >= 0:
            unlink(self._lock_path)
            os.close(self._lock)
            self._lock = -1


class ArenaReader:
    """Reader that copies data from the arena of one other process."""

    def __init__(self, incarnation: str, *, root: Path = ROOT) -> None:
        """Create a reader for the process with ``incarnation``."""
        self._name = f"penstock-{owner_of(_PURPOSE + incarnation)}-0"
        self._root = root
        self._file = -1

    def read(self, name: str, offset: int, size: int, *, field: str) -> bytearray:
        """Return ``size`` bytes of the arena, from ``offset`` on.

        Raises:
            InvalidArgument: ``name`` is not the name of the arena, or the range exceeds the arena.
            FailedPrecondition: The arena does not exist or cannot be read (reason UNREADABLE).
        """
        if name != self._name:
            raise InvalidArgument(f"{field}.name is {quoted(name)}, which is not the arena of this stream", field=field)
        with _refused_unreadable(field, "arena"):
            if self._file < 0:
                self._file = self._open(field)
            return _read_at(self._file, offset, size, field, "arena")

    def close(self) -> None:
        """Close the arena. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self, field: str) -> int:
        file = os.open(self._root / self._name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(file)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            return file
        os.close(file)
        raise InvalidArgument(f"{field}: the arena is not a regular file, or belongs to another user", field=field)
