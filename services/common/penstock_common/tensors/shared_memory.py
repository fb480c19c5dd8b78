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
"""Reason with which a receiver refuses a segment that it cannot read. The sender can send the tensor in another way."""
KEPT_FOR = 60.0
"""Seconds after which a sender removes an unread segment."""
PAUSE = 60.0
"""Seconds without further attempts after a segment could not be created."""
PROBE_BYTES = 16
"""Size of the segment with which a sender checks that the other end can read its memory."""
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
    """Return the part of segment names that identifies the process: 32 hexadecimal digits."""
    return hashlib.blake2b(incarnation.encode(), digest_size=16, person=b"penstock-owner").hexdigest()


class SegmentWriter:
    """Creates the segments of one process, with a total of at most ``max_bytes``.

    Holds a lock that shows that the process is alive. Creates nothing before the first segment. Belongs to one thread.
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
        """Bytes of segments that are not known to have been read."""
        self._tried_again_at = -math.inf

    def write(self, data: Buffer) -> SegmentRef | None:
        """Create a segment with these bytes. Returns None if there is no room or it fails; the tensor is then sent in
        another way.
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
            get_logger().warning("shared memory cannot be written; tensors go in messages for a while", why=str(e))
            self._tried_again_at = self._clock() + PAUSE
            return None
        self._unread[name] = len(data), self._clock()
        self.num_bytes += len(data)
        return SegmentRef(name, len(data))

    def __contains__(self, name: str) -> bool:
        """Return whether it is a segment that is not known to have been read."""
        return name in self._unread

    def remove(self, name: str) -> None:
        """Remove a segment if it still exists."""
        size, _ = self._unread.pop(name, (0, 0.0))
        self.num_bytes -= size
        unlink(self._root / name)

    def remove_old(self) -> None:
        """Forget segments that were read, and remove those that were unread for too long."""
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
        """Whether creating a segment failed recently, so that no attempt is made now."""
        return self._clock() < self._tried_again_at

    def has_room(self, size: int) -> bool:
        """Return whether ``size`` bytes may be written now."""
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
    """Reads the segments of one other process. It removes segments that it has read, and invalid ones."""

    def __init__(self, incarnation: str, *, root: Path = ROOT, max_bytes: int = MAX_TENSOR_BYTES) -> None:
        """Create a reader for the process with ``incarnation``."""
        self._owner = owner_of(incarnation)
        self._root = root
        self._max_bytes = max_bytes

    def read(self, name: str, offset: int, size: int, *, field: str) -> bytearray:
        """Return the ``size`` bytes of a segment from ``offset`` to its end.

        Raises:
            InvalidArgument: The name is not that of a segment of the other process, or the segment has another size.
            ResourceExhausted: ``size`` exceeds ``max_bytes``.
            FailedPrecondition: The segment does not exist or cannot be read (reason UNREADABLE).
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
        """Return the content of a probe, which shows its sender that its segments can be read here. Empty if it cannot
        be read.
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
    """Remove the segments of processes that have died. Returns their number."""
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
        get_logger().info("removed shared memory that processes had left", segments=count)
    return count


def lock_file(path: Path, *, wait: bool = True) -> int:
    """Lock a file, and return its descriptor. The file still has this name after it was locked.

    Raises OSError, including BlockingIOError if another process holds the lock. With ``wait``, wait for the lock
    instead.
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
        os.close(file)  # another process has removed it meanwhile


def unlink(path: Path) -> None:
    """Remove a file if it exists and may be removed."""
    with contextlib.suppress(OSError):  # already removed, or it belongs to another user
        path.unlink()


# An arena: shared memory that a process allocates at startup, and whose slots it reuses for tensors to other processes
# of its host.
#
# The arena is a file in ``/dev/shm`` with a fixed size, whose pages are allocated at once, so that none is missing
# later. Its owner holds a lock that shows that it is alive. A process that starts later removes arenas without an owner
# (``remove_orphans``). Both ends copy the data. So data does not change while it is read, and a truncated file cannot
# crash a reader.

MAX_SLOTS = 65_536
"""Maximum number of slots of an arena, however small they are."""
_PURPOSE = "arena:"
"""Distinguishes the owner ID of an arena from that of the process's segments."""


class Arena:
    """Slots of ``slot_bytes`` each, with at most ``size`` bytes in total. Belongs to one thread.

    Raises OSError if the memory is not available, or if ``size`` is less than one slot.
    """

    def __init__(self, incarnation: str, *, size: int, slot_bytes: int, root: Path = ROOT) -> None:
        """Allocate the arena. ``incarnation`` changes with every start of the process."""
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
        """Number of occupied slots."""
        return self._num_slots - len(self._free)

    def put(self, data: Buffer) -> int | None:
        """Write bytes into a free slot. Returns the slot's offset in bytes, or None if no slot is free.

        Raises ValueError if the bytes do not fit into a slot, OSError if they cannot be written.
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
        """Free the slot at ``offset``."""
        self._free.append(offset // self.slot_bytes)

    def close(self) -> None:
        """Free the memory. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            unlink(self._path)
        if self._lock >= 0:
            unlink(self._lock_path)
            os.close(self._lock)
            self._lock = -1


class ArenaReader:
    """Copies data from the arena of one other process."""

    def __init__(self, incarnation: str, *, root: Path = ROOT) -> None:
        """Create a reader for the process with ``incarnation``."""
        self._name = f"penstock-{owner_of(_PURPOSE + incarnation)}-0"
        self._root = root
        self._file = -1

    def read(self, name: str, offset: int, size: int, *, field: str) -> bytearray:
        """Return the ``size`` bytes from ``offset`` on.

        Raises:
            InvalidArgument: The name is not the arena's, or the range exceeds the arena.
            FailedPrecondition: The arena does not exist or cannot be read (reason UNREADABLE).
        """
        if name != self._name:
            raise InvalidArgument(f"{field}.name is {quoted(name)}; it is not the arena of this stream", field=field)
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
        raise InvalidArgument(f"{field}: the arena is no file, or another user's", field=field)
