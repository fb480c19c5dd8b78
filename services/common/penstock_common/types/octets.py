"""Bytes type for msgspec structs. Encoding accepts any bytes-like object; decoding always returns ``bytes``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Octets = bytes | bytearray
else:
    Octets = bytes
