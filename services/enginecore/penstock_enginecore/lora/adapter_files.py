"""Adapter files: opening, validation, reading, and digests of their content."""

import hashlib
import math
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

import msgspec
import torch

from penstock_common import checkpoint
from penstock_common.files import open_input
from penstock_enginecore.lora.errors import LoraError, LoraReason
from penstock_enginecore.lora.peft_format import CONFIG_FILE

# Reader of safetensors files. The reader validates the header before it allocates memory for the tensors. It reads all
# tensors into one buffer.
#
# The file is not memory-mapped, because the engine would crash if another process truncated the file. Views of one
# buffer avoid a second copy.

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Supported dtypes of stored adapters, by their names in files."""
_WIDTHS = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
}
_WIDTHS |= {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "I8": 1, "U8": 1, "BOOL": 1}
"""Bytes per number, by dtype name."""
_MAX_HEADER = 16 << 20
_MAX_NAME, _MAX_AXES = 512, 8
_LENGTH = 8
"""Size in bytes of the field with the length of the header."""


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Header entry of a tensor.

    Attributes:
        first: Offset of the tensor's first byte after the header.
        end: Offset after the tensor's last byte.
    """

    dtype_name: str
    shape: tuple[int, ...]
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in its stored dtype. ``raw`` is uint8 ``[bytes]``, a view of the buffer with the content of the file."""

    dtype_name: str
    shape: tuple[int, ...]
    raw: torch.Tensor

    def bytes(self) -> memoryview:
        """Return the tensor's bytes without copying them."""
        return self.raw.numpy().data

    def float(self) -> torch.Tensor:
        """Return the tensor as float32. The result may be a view of the buffer if the file stores float32."""
        dtype = DTYPES[self.dtype_name]
        aligned = self.raw if self.raw.storage_offset() % dtype.itemsize == 0 else self.raw.clone()
        return aligned.view(dtype).view(self.shape).float()


class TensorFile:
    """A safetensors file, read from the start of ``opened``. Raises LoraError if the header does not describe every
    byte.

    Args:
        name: Name of the file, for error messages.
        size: Size of the file in bytes.
    """

    def __init__(self, opened: BinaryIO, name: str, size: int) -> None:
        self._opened, self._name = opened, name
        length = int.from_bytes(opened.read(_LENGTH), "little")
        if size < _LENGTH or length > size - _LENGTH:
            raise self._garbled("the file's header is incomplete", f"{size} bytes")
        if length > _MAX_HEADER:
            raise self._garbled("the file's header is too large", f"{length} bytes", f"at most {_MAX_HEADER}")
        self.headers: Mapping[str, TensorHeader] = self._headers(opened.read(length))
        self._data_size = size - _LENGTH - length
        self._check_order()

    def read(self) -> dict[str, StoredTensor]:
        """Read all tensors, by name. All tensors share one buffer, which stays allocated while any of the tensors
        exists.
        """
        buffer = torch.empty(self._data_size, dtype=torch.uint8)
        view = buffer.numpy().data
        done = 0
        while done < self._data_size:
            count = self._opened.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                raise self._garbled(
                    "the file was truncated while it was read",
                    f"{done} bytes of tensors",
                    f"the file's header describes {self._data_size} bytes",
                )
            done += count
        return {
            name: StoredTensor(header.dtype_name, header.shape, buffer[header.first : header.end])
            for name, header in self.headers.items()
        }

    def _headers(self, text: bytes) -> dict[str, TensorHeader]:
        try:
            # Decode each entry separately, so that other content of the header never becomes Python objects. Such
            # objects would use many times the memory of the text.
            found = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            found.pop("__metadata__", None)
            entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in found.items()}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise self._garbled("the file's header cannot be read", str(e)) from e
        return {name: self._header(name, entry) for name, entry in entries.items()}

    def _header(self, name: str, entry: _Entry) -> TensorHeader:
        # Refuse long names and shapes, because they would take much time to process.
        if len(name) > _MAX_NAME or len(entry.shape) > _MAX_AXES:
            what, limit = "the tensor's name or shape is too long", f"at most {_MAX_NAME} characters, {_MAX_AXES} axes"
            raise LoraError(LoraReason.TENSOR_FILE, what, self._name, name[:_MAX_NAME], limit=limit)
        first, end = entry.data_offsets
        width = _WIDTHS.get(entry.dtype)
        if width is None:
            raise LoraError(
                LoraReason.DTYPE,
                "the tensor's dtype is unknown",
                self._name,
                name,
                repr(entry.dtype),
                f"supported: {', '.join(DTYPES)}",
            )
        if min(entry.shape, default=0) < 0 or not 0 <= first <= end or math.prod(entry.shape) * width != end - first:
            value = f"{entry.dtype} {entry.shape} in bytes {first} to {end}"
            raise LoraError(
                LoraReason.TENSOR_FILE, "the tensor's number of bytes does not match its shape", self._name, name, value
            )
        return TensorHeader(entry.dtype, tuple(entry.shape), first, end)

    def _check_order(self) -> None:
        """Raise LoraError if the file has gaps or overlaps between tensors, or bytes after the last tensor."""
        expected = 0
        for name, header in sorted(self.headers.items(), key=lambda item: (item[1].first, item[1].end)):
            if header.end > self._data_size:
                raise LoraError(
                    LoraReason.TENSOR_FILE,
                    "the file ends before the end of this tensor",
                    self._name,
                    name,
                    f"bytes {header.first} to {header.end}",
                    f"the file has {self._data_size} bytes after its header",
                )
            if header.first != expected:
                value = f"bytes {header.first} to {header.end}; expected to start at {expected}"
                raise LoraError(
                    LoraReason.TENSOR_FILE,
                    "the tensor does not start at the end of the previous tensor",
                    self._name,
                    name,
                    value,
                )
            expected = header.end
        if expected != self._data_size:
            raise self._garbled("the file has bytes after the last tensor", f"{self._data_size - expected} bytes")

    def _garbled(self, what: str, value: str = "", limit: str = "") -> LoraError:
        return LoraError(LoraReason.TENSOR_FILE, what, self._name, "", value, limit)


TENSORS_FILE = "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_POINTER = b"version https://git-lfs"


class AdapterFolder:
    """An open directory of an adapter. Reads always use this directory, even if its path later refers to another
    directory.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @classmethod
    @contextmanager
    def at(cls, path: Path) -> Iterator["AdapterFolder"]:
        """Open the directory while the ``with`` block runs. Raises LoraError if the directory does not exist or cannot
        be opened.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError as e:
            raise LoraError(LoraReason.NOT_FOUND, checkpoint.no_directory(str(path)), str(path)) from e
        except NotADirectoryError as e:
            what = "the path is not a directory; give the directory that contains adapter_config.json"
            raise LoraError(LoraReason.NOT_FOUND, what, str(path)) from e
        except (OSError, ValueError) as e:
            raise LoraError(LoraReason.UNREADABLE, "the directory cannot be opened", str(path), value=_why(e)) from e
        try:
            yield cls(path, descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def file(self, name: str) -> Iterator[tuple[BinaryIO, int]]:
        """Open a file, and yield it with its size in bytes.

        Raises LoraError if the file is missing or cannot be read. Also raises LoraError, at the end of the ``with``
        block, if the file was modified during the block.
        """
        try:
            descriptor = open_input(name, dir_fd=self._descriptor)
        except FileNotFoundError as e:
            raise self._missing(name) from e
        except OSError as e:
            raise LoraError(LoraReason.UNREADABLE, "the file cannot be opened", name, value=_why(e)) from e
        with open(descriptor, "rb", buffering=0) as opened:  # noqa: PTH123 - what is open already
            before = os.fstat(descriptor)
            try:
                if opened.read(len(_POINTER)) == _POINTER:
                    what = "the file is only a Git LFS pointer to the real file"
                    raise LoraError(LoraReason.NOT_FOUND, what, name, remedy="run 'git lfs pull' in that directory")
                opened.seek(0)
                yield opened, before.st_size
            except OSError as e:
                raise LoraError(LoraReason.UNREADABLE, "the file cannot be read", name, value=_why(e)) from e
            after = os.fstat(descriptor)
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise LoraError(LoraReason.UNREADABLE, "the file changed while it was read", name)

    def _missing(self, name: str) -> LoraError:
        held = set(os.listdir(self._descriptor))  # noqa: PTH208 - of what is open, not of a path
        if name == TENSORS_FILE and (pickles := sorted(held.intersection(_PICKLES))):
            remedy = "save the adapter with safe_serialization=True"
            return LoraError(LoraReason.PICKLE, "the file is a pickle, which may run code", pickles[0], remedy=remedy)
        if name == CONFIG_FILE and "config.json" in held:
            what = "the file is missing; the directory contains a model, not an adapter"
        elif name == CONFIG_FILE and (named := [each for each in sorted(held) if self._is_adapter(each)]):
            what = "the file is missing; adapters that were saved under a name are in these subdirectories"
            return LoraError(LoraReason.NOT_FOUND, what, name, value=", ".join(str(self._path / n) for n in named[:8]))
        else:
            what = "the file is missing"
        return LoraError(LoraReason.NOT_FOUND, what, name, value=str(self._path))

    def _is_adapter(self, name: str) -> bool:
        """Return whether a subdirectory contains an adapter."""
        try:
            os.stat(f"{name}/{CONFIG_FILE}", dir_fd=self._descriptor)
        except OSError:
            return False
        return True


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


class FileState(NamedTuple):
    """State of a file that tells whether its content has changed: device and inode, size, and times of changes in
    nanoseconds.
    """

    device: int
    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, opened: BinaryIO) -> Self:
        """Return the current state of an open file."""
        found = os.fstat(opened.fileno())
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class ReadBefore:
    """Cache of the digests of valid adapters. The key is the state (``FileState``) of the adapter's two files. The
    cache has the last ``capacity`` adapters.

    If a file was modified just before it was read, its digest is not cached, because a later modification might have
    the same time.

    Args:
        clock: Returns seconds since the epoch.
    """

    SETTLED = 2.0
    """Time after a modification, in seconds. If a file is modified again after this time, the two modification times
    differ on every file system.
    """

    def __init__(self, capacity: int = 16_384, clock: Callable[[], float] = time.time) -> None:
        self._capacity = capacity
        self._clock = clock
        self._digests: dict[tuple[FileState, ...], bytes] = {}  # The adapter that was used most recently is last.

    def digest(self, files: tuple[FileState, ...]) -> bytes | None:
        """Return the digest of these files' content, or None if it is unknown."""
        return self._digests.get(files)

    def remember(self, files: tuple[FileState, ...], digest: bytes) -> None:
        """Cache the digest of a valid adapter that was just read from ``files``."""
        if max(max(file.modified, file.changed) for file in files) / 1e9 > self._clock() - self.SETTLED:
            return
        self._digests.pop(files, None)
        self._digests[files] = digest
        if len(self._digests) > self._capacity:
            del self._digests[next(iter(self._digests))]


# Digests of adapters. A digest depends on the adapter's content, but not on its directory or on the layout of its
# files.

_PERSON = b"penstock.lora.1"
"""Personalization string of BLAKE2b. Increase the number in this string whenever a code change would give the same
adapter a different digest.
"""
DIGEST_SIZE = 16


@dataclass(frozen=True, slots=True)
class StoredUpdate:
    """The update ``scale * b @ a`` of the layer ``module``, with the matrices as stored in the file."""

    module: str
    scale: float
    a: StoredTensor
    b: StoredTensor


def adapter_digest(updates: Iterable[StoredUpdate]) -> bytes:
    """Return the BLAKE2b-128 digest of the updates: layers, scales and tensors.

    The digest does not depend on the order of updates or their names in files. Settings with the same meaning give the
    same digest.
    """
    state = hashlib.blake2b(digest_size=DIGEST_SIZE, person=_PERSON)
    for update in sorted(updates, key=lambda each: each.module):
        name = update.module.encode()
        state.update(struct.pack("<I", len(name)) + name + struct.pack("<d", update.scale))
        for tensor in (update.a, update.b):
            state.update(tensor.dtype_name.ljust(8).encode() + struct.pack("<QQ", *tensor.shape))
            state.update(tensor.bytes())
    return state.digest()
