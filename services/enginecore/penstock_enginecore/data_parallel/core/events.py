"""What happens to a rank that is not a request: what its driver is told, in the order of the engine's input."""

from collections.abc import Mapping

import msgspec

from penstock_common.types.data_parallel import Reconfigure, StartDpWave


class Connected(msgspec.Struct, frozen=True):
    """The ranks of an epoch's group have met."""

    epoch: int


class Gathered(msgspec.Struct, frozen=True):
    """An exchange of an epoch is over."""

    epoch: int
    rows: list[bytes]
    """Of all members, in order."""
    seconds: float = 0.0
    """From this rank's entering it."""


class Broke(msgspec.Struct, frozen=True):
    """A group could not meet, or a collective of it broke off. Nothing more comes of it."""

    epoch: int
    why: str
    unprepared: bool = False
    """Whether it is this rank that cannot be in the group."""


class Named(msgspec.Struct, frozen=True):
    """The coordinator names a group. ``meetings``: by rank, the address of its store."""

    message: Reconfigure
    meetings: Mapping[str, str]


class Refused(msgspec.Struct, frozen=True):
    """A request that was stamped with this wave of this epoch was refused before it got here."""

    epoch: int
    wave: int


GroupEvent = Connected | Gathered | Broke | Named | Refused | StartDpWave
