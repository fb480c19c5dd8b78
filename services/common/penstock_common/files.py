"""Reading of untrusted files, and handling of private files that a service writes for itself."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from penstock_common.nesting_depth import nests_deeper

# Untrusted files, such as those of models and adapters. Opening such a file never blocks, and limits apply when it is
# read and decoded.
#
# Links are followed, because Kubernetes volumes and the cache of the Hugging Face Hub use links.

MAX_SETTINGS_BYTES = 64 << 20
"""Size limit of a settings file of a model, in bytes. Settings files of published models have less than 1 MiB, and
tokenizer files less than 32 MiB.
"""
MAX_INDEX_BYTES = 256 << 20
"""Size limit of a file that maps tensors to files, in bytes. The index files of the largest published models have 15
MiB.
"""
MAX_HEADER_BYTES = 100_000_000
"""Size limit of the header of a safetensors file, in bytes, as the format defines it."""
MAX_DEPTH = 64
"""Maximum nesting depth of JSON values in files."""


def open_input(path: Path | str, *, dir_fd: int | None = None) -> int:
    """Return a descriptor that reads ``path``. Pipes and devices are refused, because they could block.

    Args:
        path: The file. Links are followed.
        dir_fd: Descriptor of the directory at which a relative path begins.

    Raises:
        OSError: The file cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(
                errno.EINVAL, "the path is not a regular file, but a directory, a pipe or a device", str(path)
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def opened_input(path: Path) -> BinaryIO:
    """Return the file, opened for reading. Raises OSError in the same cases as ``open_input``."""
    return open(open_input(path), "rb")


def read_input(path: Path, limit: int = MAX_SETTINGS_BYTES) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: In the same cases as ``open_input``.
        ValueError: The file has more than ``limit`` bytes.
    """
    with opened_input(path) as opened:
        size = os.fstat(opened.fileno()).st_size
        content = opened.read(limit + 1) if size <= limit else b""
    if max(size, len(content)) > limit:
        raise ValueError(f"the file has {max(size, len(content))} bytes; the limit is {limit}")
    return content


def read_json(path: Path, limit: int = MAX_SETTINGS_BYTES) -> Any:
    """Return the value in a JSON file.

    Raises:
        OSError: In the same cases as ``open_input``.
        ValueError: The file is too large or not JSON, or its values are nested too deeply.
    """
    return decode_json(read_input(path, limit))


def decode_json(text: bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError if ``text`` is not JSON or its values are nested too deeply."""
    try:
        value = json.loads(text)
        deep = nests_deeper(value, MAX_DEPTH)
    except RecursionError:
        deep = True
    if deep:
        raise ValueError(f"the JSON is nested more than {MAX_DEPTH} levels deep")
    return value


def read_tensor_header(opened: BinaryIO) -> tuple[int, dict[str, Any]]:
    """Return the length of a safetensors file's header, in bytes, and the header.

    Args:
        opened: The file, positioned at its start. After the call, the file is positioned at the first tensor.

    Raises:
        OSError: The file cannot be read.
        ValueError: The header is too large, is not a JSON object, or is nested too deeply. The length of the header is
            checked before the header is read.
    """
    length = int.from_bytes(opened.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"the safetensors header has {length} bytes; the limit is {MAX_HEADER_BYTES}")
    header = decode_json(opened.read(length))
    if not isinstance(header, dict):
        raise ValueError("the safetensors header is not a JSON object")
    return length, header


# Private files that a service writes for itself. No other user can read or redirect these files.

MODE = 0o600


def open_private(path: Path, *, new: bool = False) -> int:
    """Return a descriptor that reads and writes ``path``. The file is created if it is missing.

    Other users may be able to write to the directory, so links, pipes and files of other users are refused. If the file
    belongs to this user, the file keeps its content, and its mode becomes 0600.

    Args:
        path: The file. Links are followed only in the names of its directories.
        new: Whether the file must not exist yet.

    Raises:
        OSError: The file cannot be opened, is not a regular file, belongs to another user, or has several hard links.
            The text of the error states the case.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_EXCL if new else 0)
    try:
        descriptor = os.open(path, flags, MODE)
    except OSError as e:
        if e.errno == errno.ELOOP and path.is_symlink():
            raise _refused(
                errno.ELOOP, "the path is a symbolic link, which is not followed; remove the link", path
            ) from None
        raise
    try:
        _make_private(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_private(path: Path, content: bytes) -> None:
    """Write a new file. Raises FileExistsError if the file exists, and OSError in the same cases as ``open_private``."""
    with open(open_private(path, new=True), "wb") as opened:
        opened.write(content)


def _make_private(descriptor: int, path: Path) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise _refused(errno.EINVAL, "the path is not a regular file, but a pipe or a device; remove it", path)
    if found.st_uid != os.geteuid():
        what = f"the file belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}; remove the file"
        raise _refused(errno.EPERM, what, path)
    if found.st_nlink > 1:
        raise _refused(errno.EMLINK, f"the file has {found.st_nlink} names (hard links); remove the file", path)
    if stat.S_IMODE(found.st_mode) != MODE:
        os.fchmod(descriptor, MODE)


def _refused(number: int, what: str, path: Path) -> OSError:
    return OSError(number, what, str(path))
