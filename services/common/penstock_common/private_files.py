"""Files that a service writes for itself, which nobody else may read or redirect."""

import errno
import os
import stat
from pathlib import Path

MODE = 0o600


def open_private(path: Path, *, new: bool = False) -> int:
    """Return a descriptor that reads and writes ``path``, which is made if it is missing.

    Others may be able to write to the directory: a link, a pipe or a file of theirs is refused. A file of this user keeps its
    content, and its mode becomes 0600.

    Args:
        path: The file. Links are followed in the names of its directories.
        new: The file must not be there yet.

    Raises:
        OSError: It cannot be opened, or is no regular file, another user's, or known by another name as well. Text says which.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_EXCL if new else 0)
    try:
        descriptor = os.open(path, flags, MODE)
    except OSError as e:
        if e.errno == errno.ELOOP and path.is_symlink():
            raise _refused(errno.ELOOP, "it is a symbolic link, which is not followed; remove it", path) from None
        raise
    try:
        _make_private(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_private(path: Path, content: bytes) -> None:
    """Write a new file. Raises FileExistsError if there is one, and OSError as ``open_private``."""
    with open(open_private(path, new=True), "wb") as opened:
        opened.write(content)


def _make_private(descriptor: int, path: Path) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise _refused(errno.EINVAL, "it is no file, but a pipe or a device; remove it", path)
    if found.st_uid != os.geteuid():
        what = f"it belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}; remove it"
        raise _refused(errno.EPERM, what, path)
    if found.st_nlink > 1:
        raise _refused(errno.EMLINK, f"it has {found.st_nlink} names (hard links); remove it", path)
    if stat.S_IMODE(found.st_mode) != MODE:
        os.fchmod(descriptor, MODE)


def _refused(number: int, what: str, path: Path) -> OSError:
    return OSError(number, what, str(path))
