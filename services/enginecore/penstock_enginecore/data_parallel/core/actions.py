"""What a rank does beside telling its coordinator."""

import msgspec

from penstock_common.types.data_parallel import (
    PauseMode,
    Pauses,
    PeerLost,
    PrepareFailed,
    RankGroup,
    RankReport,
    StartWave,
    WaveComplete,
)
from penstock_enginecore.data_parallel.core.row import Row


class Exchange(msgspec.Struct, frozen=True):
    """Enter the exchange with this row; ``Rank.gathered`` gets the result."""

    group: RankGroup
    row: Row


class Forward(msgspec.Struct, frozen=True):
    """Enter the forward pass, with a dummy batch where there is nothing to compute; ``Rank.stepped`` follows."""

    epoch: int
    wave: int
    step: int
    pauses: Pauses
    """Under which all ranks compute it."""
    dummy: bool


class AbortCollective(msgspec.Struct, frozen=True):
    """End the collective that the rank is in, in which others may never come."""


class RollBack(msgspec.Struct, frozen=True):
    """Forget the step in flight: no token and no cached block of it stays."""


class Hold(msgspec.Struct, frozen=True):
    """Requests that come from now on wait; what there is finishes, freezes or ends."""

    mode: PauseMode


class Release(msgspec.Struct, frozen=True):
    """Whatever was held or frozen goes on."""


class ResumeRefused(msgspec.Struct, frozen=True):
    """The pause that a resume would end is not complete."""

    pauses: Pauses


class Prepare(msgspec.Struct, frozen=True):
    """Build this group beside the serving one; ``Rank.prepared`` or ``Rank.prepare_failed`` follows."""

    group: RankGroup


class Join(msgspec.Struct, frozen=True):
    """This group is the rank's own from now on."""

    group: RankGroup


class Leave(msgspec.Struct, frozen=True):
    """The rank is in no group any more: its requests end here, and go on elsewhere."""


Effect = (
    Exchange
    | Forward
    | AbortCollective
    | RollBack
    | Hold
    | Release
    | ResumeRefused
    | Prepare
    | Join
    | Leave
    | StartWave
    | WaveComplete
    | PeerLost
    | PrepareFailed
    | RankReport
)
