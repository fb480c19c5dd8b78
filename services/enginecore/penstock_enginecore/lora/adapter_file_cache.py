"""What adapters are known by whose files were read before, so that one that comes back from the disk is not hashed again."""

import os
import time
from collections.abc import Callable
from typing import BinaryIO, NamedTuple, Self


class FileState(NamedTuple):
    """What changes with a file's content: which file it is, its size, and when it was changed, in nanoseconds."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, opened: BinaryIO) -> Self:
        """As it is now."""
        found = os.fstat(opened.fileno())
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class ReadBefore:
    """Digests by the state of an adapter's two files, of the last ``capacity`` that were found good. Files that were changed just
    before they were read are not remembered: another change might have the same time. ``clock``: seconds since the epoch.
    """

    SETTLED = 2.0
    """Seconds after which a change has a time of its own on any file system."""

    def __init__(self, capacity: int = 16_384, clock: Callable[[], float] = time.time) -> None:
        self._capacity = capacity
        self._clock = clock
        self._digests: dict[tuple[FileState, ...], bytes] = {}  # what was found last last

    def digest(self, files: tuple[FileState, ...]) -> bytes | None:
        """Of what lies in these files; None where that is not known."""
        return self._digests.get(files)

    def remember(self, files: tuple[FileState, ...], digest: bytes) -> None:
        """What was read from ``files`` just now has this digest, and is good."""
        if max(max(file.modified, file.changed) for file in files) / 1e9 > self._clock() - self.SETTLED:
            return
        self._digests.pop(files, None)
        self._digests[files] = digest
        if len(self._digests) > self._capacity:
            del self._digests[next(iter(self._digests))]
