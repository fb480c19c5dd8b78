"""What is said of an adapter's name at run time."""

import sys
from typing import TypeAlias

import msgspec

_RECORD_BYTES = 512
"""Bytes of memory that a registration and its places in a registry take beside its texts, at most."""

Precedence: TypeAlias = "tuple[int, str, bool, str, bytes, bool]"


class LoraAdapter(msgspec.Struct, frozen=True):
    """An adapter as requests name it to engines."""

    name: str
    """A label; what counts is the content."""
    path: str
    """Directory on the engines' machines."""
    digest: bytes = b""
    """BLAKE2b-128 of its config and tensors, as an engine computed it; empty where nobody has read it yet."""


class LoraRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """One version of what a name means. An unload is a version, too: one that comes later than an older load undoes nothing."""

    name: str
    version: int
    """From 1; the highest that its frontend had seen of any name, plus one."""
    frontend_id: str
    """The frontend that it was said to: of two of one version that with the higher id counts."""
    unloaded: bool = False
    """Whether the name means nothing any more; then what follows means nothing either."""
    path: str = ""
    digest: bytes = b""
    pinned: bool = False
    """Whether engines keep it in memory."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of memory that a registry needs for this."""
        return _RECORD_BYTES + sum(map(sys.getsizeof, (self.name, self.frontend_id, self.path, self.digest)))

    @property
    def adapter(self) -> LoraAdapter:
        """What requests send to engines."""
        return LoraAdapter(self.name, self.path, self.digest)

    @property
    def precedence(self) -> Precedence:
        """Of two registrations of a name that with the higher one counts. What a frontend says under an id that it had in an
        earlier life may have a version that it gave then: the rest decides, so that everybody decides alike.
        """
        return self.version, self.frontend_id, self.unloaded, self.path, self.digest, self.pinned


class LoraRefusal(msgspec.Struct, frozen=True):
    """A registration for which the coordinator has no room."""

    name: str
    reason: str
    """Which limit is reached: the number, the setting, its value."""
