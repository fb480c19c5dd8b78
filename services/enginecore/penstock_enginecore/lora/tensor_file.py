"""A safetensors file: its header checked whole before memory is given to it, its tensors read at once into memory of ours.

A mapped file would kill the engine where somebody cuts it off while it is read; and views of one buffer need no second copy.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

import msgspec
import torch

from penstock_enginecore.lora.errors import LoraError, LoraReason

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
