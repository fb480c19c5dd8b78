"""Protobuf messages as hand-written trees of records, including messages that no library would write."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

VARINT, FIXED64, BYTES, GROUP, END_GROUP, FIXED32 = range(6)
Tree = list["Record"]

_FIXED64_TYPES = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64)
_FIXED32_TYPES = (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32)
_BYTES_TYPES = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE)


@dataclass(slots=True)
class Record:
    """A field on the wire. ``value`` is a number, bytes, or the records of a message. ``field`` is None if unknown."""

    number: int
    wire: int
    value: int | bytes | Tree
    field: Any = None

    def copy(self) -> Record:
        """Return a copy that can be changed."""
        value = [record.copy() for record in self.value] if isinstance(self.value, list) else self.value
        return Record(self.number, self.wire, value, self.field)


def wire_of(field: FieldDescriptor) -> int:
    """Return the wire type of one value of a field."""
    if field.type in _FIXED64_TYPES:
        return FIXED64
    if field.type in _FIXED32_TYPES:
        return FIXED32
    return BYTES if field.type in _BYTES_TYPES else VARINT


def varint(value: int) -> bytes:
    """Return a number as a varint of at most ten bytes. Negative numbers have protobuf's encoding."""
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode(tree: Tree) -> bytes:
    """Return the bytes of a message."""
    out = bytearray()
    for record in tree:
        out += varint(record.number << 3 | record.wire)
        value = record.value
        if isinstance(value, list):
            value = encode(value)
        if record.wire == VARINT:
            out += varint(value) if isinstance(value, int) else value
        elif record.wire == FIXED64:
            out += struct.pack("<Q", value & 2**64 - 1) if isinstance(value, int) else value
        elif record.wire == FIXED32:
            out += struct.pack("<I", value & 2**32 - 1) if isinstance(value, int) else value
        elif record.wire == BYTES:
            content = varint(value) if isinstance(value, int) else value
            out += varint(len(content)) + content
    return bytes(out)


def decode(data: bytes, kind: Descriptor) -> Tree:
    """Return the records of a well-formed message."""
    tree: Tree = []
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        number, wire = key >> 3, key & 7
        field = kind.fields_by_number.get(number)
        value: int | bytes | Tree
        if wire == VARINT:
            value, at = _read_varint(data, at)
        elif wire == BYTES:
            size, at = _read_varint(data, at)
            value, at = data[at : at + size], at + size
            if field is not None and field.type == FieldDescriptor.TYPE_MESSAGE:
                value = decode(value, field.message_type)
        else:
            size = 8 if wire == FIXED64 else 4
            value, at = data[at : at + size], at + size
        tree.append(Record(number, wire, value, field))
    return tree


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
