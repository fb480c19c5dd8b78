"""The files of an adapter: how they are opened, known again without being hashed, and the digest of what is in them."""

import hashlib
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

from penstock_common import checkpoint
from penstock_common.input_files import open_input
from penstock_enginecore.lora.errors import LoraError, LoraReason
from penstock_enginecore.lora.peft_format import CONFIG_FILE
from penstock_enginecore.lora.tensor_file import StoredTensor

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
