"""Messages between the ranks of a data-parallel group, their coordinator and their frontends.

A rank is an engine of the group, identified by its engine ID and its incarnation. So an engine is a different rank
after a restart.
"""

import enum

import msgspec

_SEPARATOR = "#"


def rank_name(engine_id: str, incarnation: str) -> str:
    """Return the rank name of one incarnation of an engine."""
    return f"{engine_id}{_SEPARATOR}{incarnation}"


def engine_of(rank: str) -> tuple[str, str]:
    """Return the engine ID and the incarnation of a rank. Incarnations contain no "#"."""
    engine_id, _, incarnation = rank.rpartition(_SEPARATOR)
    return engine_id, incarnation


class PauseMode(enum.IntEnum):
    """Treatment of running requests when a group pauses. A stronger mode has a larger value.

    On the wire, modes are ``penstock.common.v1.PauseMode``.
    """

    NONE = 0
    """The group is not paused."""
    WAIT = 1
    """Running requests complete before the pause starts."""
    KEEP = 2
    """Running requests stop, and continue when the group resumes."""
    ABORT = 3
    """Running requests end with the finish reason ABORT."""


class Pauses(msgspec.Struct, frozen=True, order=True, cache_hash=True, gc=False):
    """Number of pauses and resumes, and the mode of the current pause. A pause state with a greater value is newer, or
    has a stronger mode.
    """

    number: int = 0
    """Number of pauses and resumes so far. The number is odd while the group is paused."""
    mode: PauseMode = PauseMode.NONE

    @property
    def on(self) -> bool:
        """Whether the group is paused."""
        return self.number % 2 == 1

    def pause(self, mode: PauseMode) -> "Pauses":
        """Return the pause state after one more pause. If the group is already paused, the stronger of the two modes
        applies.
        """
        return Pauses(self.number, max(self.mode, mode)) if self.on else Pauses(self.number + 1, mode)

    def resume(self) -> "Pauses":
        """Return the pause state after a resume. If the group is not paused, the state is unchanged."""
        return Pauses(self.number + 1) if self.on else self


class Place(msgspec.Struct, frozen=True, order=True, cache_hash=True, gc=False):
    """Progress of a rank: epoch, wave, step and pauses. The progress of a rank never decreases."""

    epoch: int = 0
    """Number of the epoch. In an epoch, the members of the group do not change."""
    wave: int = 0
    """Number of times that the group has changed from running to idle."""
    step: int = 0
    """Number of forward passes that the rank has run in the wave."""
    pauses: int = 0
    """Number of pauses and resumes of the group so far."""


class RankGroup(msgspec.Struct, frozen=True, cache_hash=True):
    """Members of a group in one epoch."""

    epoch: int = 0
    """Number of the epoch, or 0 for no group."""
    members: tuple[str, ...] = ()
    """Names of the ranks, in order of rank."""


class StartWave(msgspec.Struct, frozen=True, cache_hash=True):
    """Rank to coordinator: the rank is in the first exchange of this wave. Frontends also get this message until other
    ranks join the wave.
    """

    engine: str
    epoch: int
    wave: int
    pauses: Pauses


class WaveComplete(msgspec.Struct, frozen=True, cache_hash=True):
    """Rank 0 to coordinator: this wave has ended, and all ranks are idle."""

    engine: str
    epoch: int
    wave: int
    pauses: Pauses


class StartDpWave(msgspec.Struct, frozen=True, cache_hash=True):
    """Coordinator or frontend to a rank: join this wave."""

    engine: str
    epoch: int
    wave: int
    pauses: Pauses


class FirstRequest(msgspec.Struct, frozen=True, cache_hash=True):
    """Frontend to coordinator: the frontend sent a request to this rank while, as far as the frontend knew, the group
    was idle.
    """

    engine: str
    epoch: int
    wave: int


class PeerLost(msgspec.Struct, frozen=True, cache_hash=True):
    """Rank to coordinator: a collective operation of this epoch failed."""

    engine: str
    epoch: int


class Reconfigure(msgspec.Struct, frozen=True, cache_hash=True):
    """Coordinator to a rank: join this group."""

    engine: str
    group: RankGroup
    wave: int
    """Lowest wave number that the group may use."""
    pauses: Pauses
    """Newest pause state known to the coordinator."""
    base: int = 0
    """Epoch of the group that serves while the new group is prepared. Its ranks switch to the new group together.

    0 means that the rank leaves its current group immediately.
    """
    target_size: int = 0
    """Target number of ranks, or 0 if unknown. Ranks store this number, so that a restarted coordinator can get the
    number from the ranks.
    """


class PrepareFailed(msgspec.Struct, frozen=True, cache_hash=True):
    """Rank to coordinator: the rank cannot join the group of this epoch."""

    engine: str
    epoch: int


class RankReport(msgspec.Struct, frozen=True, cache_hash=True):
    """Rank to coordinator: progress of the rank. The rank sends this report at registration, after an epoch's first
    exchange, and to renew leases.
    """

    engine: str
    group: RankGroup
    place: Place
    pauses: Pauses
    running: bool
    """Whether the rank runs steps of a wave."""
    opening: bool
    """Whether the first exchange of the epoch, in which the ranks gather data of all ranks, is still in progress."""
    prepared: int = 0
    """Epoch of a prepared group to which the rank can switch, or 0 if there is no such group."""


class GroupView(msgspec.Struct, frozen=True, cache_hash=True):
    """Coordinator to frontends: state of the group to which the frontends send requests."""

    group: RankGroup = RankGroup()
    wave: int = 0
    running: bool = False
    """Whether a rank has reported the start of the wave, and no rank has reported its end."""
    pauses: Pauses = Pauses()
    routed: tuple[str, ...] = ()
    """Members that accept new requests."""


class PoolGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The group of a pool, as it appears in cluster views."""

    model: str
    pool: str
    view: GroupView
    target_size: int = 0
    """Target number of ranks."""
    suspended: bool = False
    """Whether the group waits for ranks to join. The group computes nothing during this time."""


class GroupRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """Data that a rank sends when it registers."""

    size: int
    """Number of ranks of the first group."""
    min_size: int
    """Minimum number of ranks with which the group continues."""
    waits: bool = False
    """Whether the group waits for a replacement when a rank is lost."""
    meeting_address: str
    """Address (host:port) of this engine's rendezvous store. The ranks connect to this store if this engine is rank 0.
    """
    parallel_config: dict[str, str]
    """Settings that must be equal on all ranks, by name."""
    report: RankReport
    target_size: int = 0
    """Target number of ranks that the rank received last, or 0 if it has received none."""
    max_size: int = 0
    """Maximum number of ranks: the number of experts, if experts are distributed over ranks. 0 means no limit."""
