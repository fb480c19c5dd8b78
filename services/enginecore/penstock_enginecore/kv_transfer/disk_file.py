"""A file of KV blocks. It has a header and slots of equal size. Each slot stores the name, checksum and content of a
block.

If a later process opens the file with the same fingerprint, it can use the blocks. The engine does not flush writes to
the disk explicitly. If a slot was only partly written, its checksum does not match, and the slot counts as empty.
"""

import errno
import fcntl
import os
import struct
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from penstock_common.errors import ConfigError
from penstock_common.files import open_private
from penstock_common.types.kv_transfer import BlockName
from penstock_enginecore.kv_transfer.core.base import Content
from penstock_enginecore.worker.device_thread import DeviceThread

FILE_NAME = "kv_blocks"
STATES_FILE_NAME = "states"
_MAGIC = b"PNSTKKV1"
_PAGE = 4096
_HEADER = struct.Struct("<8s Q Q 16s Q I")
"""Layout of the file's header: magic word, size of a block in bytes, number of slots, fingerprint, generation, checksum
of these fields.
"""
_SLOT = struct.Struct("<8s Q I I B 32s I I")
"""Layout of a slot's header: magic word, generation, group, size of the block in bytes, length of the hash in bytes,
hash, checksum of the block, checksum of these fields.
"""


class DiskFile:
    """A ``BlockStore`` that stores blocks in a file. A separate thread does all reads and writes.

    ``entries`` has the slots and names of the blocks that were in the file when it was opened. Writes do not change
    ``entries``.

    Raises ConfigError if the directory cannot be written, is full, or is used by another running engine, or if ``size``
    is too small for a block.
    """

    def __init__(
        self,
        directory: Path,
        size: int,
        block_bytes: int,
        fingerprint: bytes,
        name: str = FILE_NAME,
        setting: str = "cache.disk_size",
    ) -> None:
        """Open or create the file.

        Args:
            directory: Directory of the file.
            size: Size of the file in bytes.
            block_bytes: Size of a block in bytes.
            fingerprint: 16 bytes that identify everything on which a block's content depends. If the fingerprint is
                empty, existing blocks are ignored, and later processes ignore the blocks of this process.
            name: Name of the file. States of recurrent layers are in a separate file, because their size differs from
                the size of blocks.
            setting: Name of the setting that determines ``size``, for error messages.
        """
        self._block_bytes = block_bytes
        self._stride = -(-(_SLOT.size + block_bytes) // _PAGE) * _PAGE
        self.num_slots = (size - _PAGE) // self._stride
        if self.num_slots < 1:
            raise ConfigError(
                f"{setting} is {size} bytes, but {'a KV block' if name == FILE_NAME else 'a state'} takes {self._stride} "
                f"bytes and the file's header {_PAGE} bytes; increase {setting} to at least their sum"
            )
        self._path = directory / name
        self._descriptor = _open(directory, self._path)
        self._generation = 1
        self._fingerprint = fingerprint
        try:
            self.entries = self._found() if fingerprint else []
            if not self.entries:
                self._begin_anew(_PAGE + self.num_slots * self._stride, setting)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._lock = threading.Lock()
        self._closed = False
        self._thread = DeviceThread("kv disk")

    def read(self, slots: Sequence[tuple[int, BlockName]]) -> "Future[list[Content | None]]":
        return self._thread.submit_next(partial(self._read_all, list(slots)))

    def write(self, slot: int, name: BlockName, content: Content) -> "Future[None]":
        return self._thread.submit(partial(self._write, slot, name, content, self._generation))

    def clear(self) -> None:
        self._generation += 1
        self._thread.call(self._write_header)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._thread.call(partial(os.close, self._descriptor))
        self._thread.stop()

    # Methods that run on the store's thread, or before that thread starts.

    def _read_all(self, slots: list[tuple[int, BlockName]]) -> list[Content | None]:
        return [self._read(slot, name) for slot, name in slots]

    def _read(self, slot: int, name: BlockName) -> Content | None:
        data = os.pread(self._descriptor, _SLOT.size + self._block_bytes, self._offset(slot))
        found = self._slot(data[: _SLOT.size])
        if found is None or found[0] != name:
            return None
        content = memoryview(data)[_SLOT.size :]
        return content if len(content) == self._block_bytes and zlib.crc32(content) == found[1] else None

    def _write(self, slot: int, name: BlockName, content: Content, generation: int) -> None:
        if len(content) != self._block_bytes:
            raise OSError(errno.EINVAL, f"a block has {len(content)} bytes; expected {self._block_bytes} bytes")
        if len(name.hash) > 32:
            raise OSError(errno.EINVAL, f"a block's hash has {len(name.hash)} bytes; the limit is 32")
        fields = (_MAGIC, generation, name.group, len(content), len(name.hash), name.hash, zlib.crc32(content))
        header = _SLOT.pack(*fields, 0)
        header = header[:-4] + zlib.crc32(header[:-4]).to_bytes(4, "little")
        parts = [header, content]
        size = _SLOT.size + len(content)
        if os.pwritev(self._descriptor, parts, self._offset(slot)) != size:
            raise OSError(errno.EIO, f"only a part of a block could be written to {self._path}")

    def _slot(self, header: bytes) -> tuple[BlockName, int] | None:
        """Return the name and checksum of the block in a slot, from the slot's header. The result is None if the header
        is invalid.
        """
        if len(header) < _SLOT.size or zlib.crc32(header[:-4]).to_bytes(4, "little") != header[-4:]:
            return None
        magic, generation, group, size, hash_bytes, block_hash, checksum, _ = _SLOT.unpack(header)
        if magic != _MAGIC or generation != self._generation or size != self._block_bytes or hash_bytes > 32:
            return None
        return BlockName(group, block_hash[:hash_bytes]), checksum

    def _found(self) -> list[tuple[int, BlockName]]:
        """Return the slots and names of the blocks in an existing file with the same parameters, and continue with the
        file's generation. The result is empty if the parameters differ.
        """
        header = os.pread(self._descriptor, _HEADER.size, 0)
        if len(header) < _HEADER.size or zlib.crc32(header[:-4]).to_bytes(4, "little") != header[-4:]:
            return []
        magic, block_bytes, num_slots, fingerprint, generation, _ = _HEADER.unpack(header)
        if (magic, block_bytes, num_slots) != (_MAGIC, self._block_bytes, self.num_slots):
            return []
        if fingerprint != self._fingerprint.ljust(16, b"\0"):
            return []
        self._generation = generation
        found: dict[BlockName, int] = {}
        for slot in range(self.num_slots):
            of_slot = self._slot(os.pread(self._descriptor, _SLOT.size, self._offset(slot)))
            if of_slot is not None:
                found.setdefault(of_slot[0], slot)
        return [(slot, name) for name, slot in found.items()]

    def _begin_anew(self, size: int, setting: str) -> None:
        os.ftruncate(self._descriptor, 0)
        try:
            os.posix_fallocate(self._descriptor, 0, size)
        except OSError as e:
            os.ftruncate(self._descriptor, 0)
            raise ConfigError(
                f"{setting} is {size} bytes, but {self._path.parent} has too little free space: {e}"
            ) from e
        self._write_header()

    def _write_header(self) -> None:
        fingerprint = self._fingerprint.ljust(16, b"\0")
        header = _HEADER.pack(_MAGIC, self._block_bytes, self.num_slots, fingerprint, self._generation, 0)
        header = header[:-4] + zlib.crc32(header[:-4]).to_bytes(4, "little")
        os.pwrite(self._descriptor, header, 0)

    def _offset(self, slot: int) -> int:
        return _PAGE + slot * self._stride


def _open(directory: Path, path: Path) -> int:
    """Open the file and lock it against use by other engines. Raises ConfigError if the directory cannot be written or
    another engine uses the directory.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = open_private(path)
    except OSError as e:
        raise ConfigError(f"cache.disk is {str(directory)!r}, but the directory cannot be written: {e}") from e
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        os.close(descriptor)
        raise ConfigError(f"cache.disk is {str(directory)!r}, but another engine uses this directory: {e}") from e
    return descriptor
