"""Files that come from outside, read with care, and files that a service writes for itself alone."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from penstock_common.nesting_depth import nests_deeper

# Files that come from outside, such as those of models and adapters: opened without waiting, read and decoded within limits.
#
# Links are followed, since volumes of Kubernetes and the hub's cache consist of them.

MAX_SETTINGS_BYTES = 64 << 20
"""Size limit of a file of settings, in bytes. Those of published models have less than 1 MiB, tokenizers' less than 32 MiB."""
MAX_INDEX_BYTES = 256 << 20
"""Size limit of a file that says which tensors are in which file, in bytes. The largest published models have 15 MiB."""
MAX_HEADER_BYTES = 100_000_000
"""Size limit of the header of a safetensors file, in bytes. It is that of the format."""
MAX_DEPTH = 64
"""How deeply JSON in files may nest."""


def open_input(path: Path | str, *, dir_fd: int | None = None) -> int:
    """Return a descriptor that reads ``path``. A pipe or a device is refused, not waited for.

    Args:
        path: The file. Links are followed.
        dir_fd: Descriptor of the directory that a relative path begins at.

    Raises:
        OSError: It cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no file, but a directory, a pipe or a device", str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def opened_input(path: Path) -> BinaryIO:
    """Return the file, open to be read. Raises OSError as ``open_input``."""
    return open(open_input(path), "rb")


def read_input(path: Path, limit: int = MAX_SETTINGS_BYTES) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: As ``open_input``.
        ValueError: It has more than ``limit`` bytes.
    """
    with opened_input(path) as opened:
        size = os.fstat(opened.fileno()).st_size
        content = opened.read(limit + 1) if size <= limit else b""
    if max(size, len(content)) > limit:
        raise ValueError(f"it has {max(size, len(content))} bytes; the limit is {limit}")
    return content


def read_json(path: Path, limit: int = MAX_SETTINGS_BYTES) -> Any:
    """Return the value that a file of JSON holds.

    Raises:
        OSError: As ``open_input``.
        ValueError: It is too large, is no JSON, or nests too deeply.
    """
    return decode_json(read_input(path, limit))


def decode_json(text: bytes) -> Any:
    """Return the value of ``text``. Raises ValueError if it is no JSON, or nests too deeply."""
    try:
        value = json.loads(text)
        deep = nests_deeper(value, MAX_DEPTH)
    except RecursionError:
        deep = True
    if deep:
        raise ValueError(f"its JSON nests deeper than {MAX_DEPTH} levels")
    return value


def read_tensor_header(opened: BinaryIO) -> tuple[int, dict[str, Any]]:
    """Return the length of a safetensors file's header, in bytes, and the header.

    Args:
        opened: The file, at its start. It is left where the tensors begin.

    Raises:
        OSError: The file cannot be read.
        ValueError: The header is too large, or no JSON object, or nests too deeply. Its length is checked before it is read.
    """
    length = int.from_bytes(opened.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header has {length} bytes; the limit is {MAX_HEADER_BYTES}")
    header = decode_json(opened.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return length, header


# Files that a service writes for itself, which nobody else may read or redirect.

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
