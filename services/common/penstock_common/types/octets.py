"""Bytes as msgpack knows them: it writes either kind, and what it reads is always ``bytes``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Octets = bytes | bytearray
else:
    Octets = bytes
