"""The files of an adapter: opened, checked, read, and known again by a digest."""

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

# A safetensors file: its header checked whole before memory is given to it, its tensors read at once into memory of ours.
#
# A mapped file would kill the engine where somebody cuts it off while it is read; and views of one buffer need no second copy.

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Those that adapters may be stored in, by their names in files."""
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
"""Bytes of a number."""
_MAX_HEADER = 16 << 20
_MAX_NAME, _MAX_AXES = 512, 8
_LENGTH = 8
"""Bytes in front of the header."""


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Of a tensor. Its bytes are those from ``first`` to before ``end`` behind the header."""

    dtype_name: str
    shape: tuple[int, ...]
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it is stored. ``raw`` uint8 ``[bytes]``, a part of what was read."""

    dtype_name: str
    shape: tuple[int, ...]
    raw: torch.Tensor

    def bytes(self) -> memoryview:
        """Without a copy."""
        return self.raw.numpy().data

    def float(self) -> torch.Tensor:
        """As float32; a view of what was read where it is stored so, and may be."""
        dtype = DTYPES[self.dtype_name]
        aligned = self.raw if self.raw.storage_offset() % dtype.itemsize == 0 else self.raw.clone()
        return aligned.view(dtype).view(self.shape).float()


class TensorFile:
    """Called ``name``, of ``size`` bytes, read from where ``opened`` is, its start. Raises LoraError unless all its bytes are
    accounted for, as safetensors wants it.
    """

    def __init__(self, opened: BinaryIO, name: str, size: int) -> None:
        self._opened, self._name = opened, name
        length = int.from_bytes(opened.read(_LENGTH), "little")
        if size < _LENGTH or length > size - _LENGTH:
            raise self._garbled("it has no whole header", f"{size} bytes")
        if length > _MAX_HEADER:
            raise self._garbled("its header is too large", f"{length} bytes", f"at most {_MAX_HEADER}")
        self.headers: Mapping[str, TensorHeader] = self._headers(opened.read(length))
        self._data_size = size - _LENGTH - length
        self._check_order()

    def read(self) -> dict[str, StoredTensor]:
        """All tensors, by name. Their bytes lie in one buffer, which lives as long as one of them."""
        buffer = torch.empty(self._data_size, dtype=torch.uint8)
        view = buffer.numpy().data
        done = 0
        while done < self._data_size:
            count = self._opened.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                raise self._garbled(
                    "it ended while it was read", f"{done} bytes of tensors", f"its header speaks of {self._data_size}"
                )
            done += count
        return {
            name: StoredTensor(header.dtype_name, header.shape, buffer[header.first : header.end])
            for name, header in self.headers.items()
        }

    def _headers(self, text: bytes) -> dict[str, TensorHeader]:
        try:
            # Entry by entry, so that a header of other things never becomes objects, which take many times its size.
            found = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            found.pop("__metadata__", None)
            entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in found.items()}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise self._garbled("its header cannot be read", str(e)) from e
        return {name: self._header(name, entry) for name, entry in entries.items()}

    def _header(self, name: str, entry: _Entry) -> TensorHeader:
        if len(name) > _MAX_NAME or len(entry.shape) > _MAX_AXES:  # what is done with them takes time
            what, limit = "its name or shape is too long", f"at most {_MAX_NAME} characters, {_MAX_AXES} axes"
            raise LoraError(LoraReason.TENSOR_FILE, what, self._name, name[:_MAX_NAME], limit=limit)
        first, end = entry.data_offsets
        width = _WIDTHS.get(entry.dtype)
        if width is None:
            raise LoraError(
                LoraReason.DTYPE,
                "its type is unknown",
                self._name,
                name,
                repr(entry.dtype),
                f"served: {', '.join(DTYPES)}",
            )
        if min(entry.shape, default=0) < 0 or not 0 <= first <= end or math.prod(entry.shape) * width != end - first:
            value = f"{entry.dtype} {entry.shape} in bytes {first} to {end}"
            raise LoraError(LoraReason.TENSOR_FILE, "its bytes are not those of its shape", self._name, name, value)
        return TensorHeader(entry.dtype, tuple(entry.shape), first, end)

    def _check_order(self) -> None:
        """One behind the other, to the end of the file."""
        expected = 0
        for name, header in sorted(self.headers.items(), key=lambda item: (item[1].first, item[1].end)):
            if header.end > self._data_size:
                raise LoraError(
                    LoraReason.TENSOR_FILE,
                    "the file is cut off in or before it",
                    self._name,
                    name,
                    f"bytes {header.first} to {header.end}",
                    f"it has {self._data_size} bytes behind its header",
                )
            if header.first != expected:
                value = f"bytes {header.first} to {header.end}, where {expected} is next"
                raise LoraError(
                    LoraReason.TENSOR_FILE, "it does not lie behind the one before", self._name, name, value
                )
            expected = header.end
        if expected != self._data_size:
            raise self._garbled("it has bytes of no tensor", f"{self._data_size - expected} at its end")

    def _garbled(self, what: str, value: str = "", limit: str = "") -> LoraError:
        return LoraError(LoraReason.TENSOR_FILE, what, self._name, "", value, limit)


TENSORS_FILE = "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_POINTER = b"version https://git-lfs"


class AdapterFolder:
    """A directory that stays the same one while it is open, whatever its path comes to mean."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @classmethod
    @contextmanager
    def at(cls, path: Path) -> Iterator["AdapterFolder"]:
        """Open while the ``with`` block runs. Raises LoraError."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError as e:
            raise LoraError(LoraReason.NOT_FOUND, checkpoint.no_directory(str(path)), str(path)) from e
        except NotADirectoryError as e:
            what = "it is no directory; give the one that holds adapter_config.json"
            raise LoraError(LoraReason.NOT_FOUND, what, str(path)) from e
        except (OSError, ValueError) as e:
            raise LoraError(LoraReason.UNREADABLE, "it cannot be opened", str(path), value=_why(e)) from e
        try:
            yield cls(path, descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def file(self, name: str) -> Iterator[tuple[BinaryIO, int]]:
        """A file, and its size in bytes. Raises LoraError where it is missing or cannot be read, and behind the ``with`` block
        where it has been written to meanwhile.
        """
        try:
            descriptor = open_input(name, dir_fd=self._descriptor)
        except FileNotFoundError as e:
            raise self._missing(name) from e
        except OSError as e:
            raise LoraError(LoraReason.UNREADABLE, "it cannot be opened", name, value=_why(e)) from e
        with open(descriptor, "rb", buffering=0) as opened:  # noqa: PTH123 - what is open already
            before = os.fstat(descriptor)
            try:
                if opened.read(len(_POINTER)) == _POINTER:
                    what = "it is a Git LFS pointer, not the file itself"
                    raise LoraError(LoraReason.NOT_FOUND, what, name, remedy="run 'git lfs pull' in that directory")
                opened.seek(0)
                yield opened, before.st_size
            except OSError as e:
                raise LoraError(LoraReason.UNREADABLE, "it cannot be read", name, value=_why(e)) from e
            after = os.fstat(descriptor)
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise LoraError(LoraReason.UNREADABLE, "it changed while it was read", name)

    def _missing(self, name: str) -> LoraError:
        held = set(os.listdir(self._descriptor))  # noqa: PTH208 - of what is open, not of a path
        if name == TENSORS_FILE and (pickles := sorted(held.intersection(_PICKLES))):
            remedy = "save it with safe_serialization=True"
            return LoraError(LoraReason.PICKLE, "it is a pickle, which may run code", pickles[0], remedy=remedy)
        if name == CONFIG_FILE and "config.json" in held:
            what = "it is missing; the directory holds a model, not an adapter"
        elif name == CONFIG_FILE and (named := [each for each in sorted(held) if self._is_adapter(each)]):
            what = "it is missing; adapters that were saved under a name are in"
            return LoraError(LoraReason.NOT_FOUND, what, name, value=", ".join(str(self._path / n) for n in named[:8]))
        else:
            what = "it is missing"
        return LoraError(LoraReason.NOT_FOUND, what, name, value=str(self._path))

    def _is_adapter(self, name: str) -> bool:
        """Whether an adapter is in a directory within."""
        try:
            os.stat(f"{name}/{CONFIG_FILE}", dir_fd=self._descriptor)
        except OSError:
            return False
        return True


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


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


# What an adapter is known by: its content, wherever it lies and however it was written down.

_PERSON = b"penstock.lora.1"
"""Another number wherever the same adapter would get another digest."""
DIGEST_SIZE = 16


@dataclass(frozen=True, slots=True)
class StoredUpdate:
    """Of the layer called ``module``: ``scale * b @ a``, as it is stored."""

    module: str
    scale: float
    a: StoredTensor
    b: StoredTensor


def adapter_digest(updates: Iterable[StoredUpdate]) -> bytes:
    """BLAKE2b-128 of what the updates are: layers, scales, tensors. Their order, what they are called in files, and settings that
    come to the same do not matter.
    """
    state = hashlib.blake2b(digest_size=DIGEST_SIZE, person=_PERSON)
    for update in sorted(updates, key=lambda each: each.module):
        name = update.module.encode()
        state.update(struct.pack("<I", len(name)) + name + struct.pack("<d", update.scale))
        for tensor in (update.a, update.b):
            state.update(tensor.dtype_name.ljust(8).encode() + struct.pack("<QQ", *tensor.shape))
            state.update(tensor.bytes())
    return state.digest()
