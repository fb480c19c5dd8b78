"""Messages between the ranks of a data-parallel group, their coordinator and their frontends.

A rank is an engine of the group, identified by its engine ID and its incarnation. So a restarted engine is another
rank.
"""

import enum

import msgspec

_SEPARATOR = "#"


def rank_name(engine_id: str, incarnation: str) -> str:
    """Return the rank name of an engine, which is valid from one start to its end."""
    return f"{engine_id}{_SEPARATOR}{incarnation}"


def engine_of(rank: str) -> tuple[str, str]:
    """Return the engine ID and the incarnation of a rank. Incarnations contain no "#"."""
    engine_id, _, incarnation = rank.rpartition(_SEPARATOR)
    return engine_id, incarnation


class PauseMode(enum.IntEnum):
    """Treatment of requests when a group pauses. The stronger of two modes has the larger value.

    On the wire, modes are ``penstock.common.v1.PauseMode``.
    """

    NONE = 0
    """The group is not paused."""
    WAIT = 1
    """Requests complete first."""
    KEEP = 2
    """Requests are frozen, and continue at resume."""
    ABORT = 3
    """Requests end as ABORT."""


class Pauses(msgspec.Struct, frozen=True, order=True, cache_hash=True, gc=False):
    """Number of pauses and resumes, and the mode of the current pause. Of two values, the greater is newer or stronger."""

    number: int = 0
    """Odd while the group is paused."""
    mode: PauseMode = PauseMode.NONE

    @property
    def on(self) -> bool:
        """Whether the group is paused."""
        return self.number % 2 == 1

    def pause(self, mode: PauseMode) -> "Pauses":
        """Return the state after a pause. If the group is already paused, the stronger mode applies."""
        return Pauses(self.number, max(self.mode, mode)) if self.on else Pauses(self.number + 1, mode)

    def resume(self) -> "Pauses":
        """Return the state after a resume. Unchanged if the group is not paused."""
        return Pauses(self.number + 1) if self.on else self


class Place(msgspec.Struct, frozen=True, order=True, cache_hash=True, gc=False):
    """Progress of a rank. It never decreases for one rank."""

    epoch: int = 0
    """Number of the group's membership."""
    wave: int = 0
    """Number of transitions from running to idle."""
    step: int = 0
    """Number of forward passes in the wave."""
    pauses: int = 0
    """Number of pauses and resumes."""


class RankGroup(msgspec.Struct, frozen=True, cache_hash=True):
    """Members of a group in one epoch."""

    epoch: int = 0
    """Number of the epoch, or 0 for no group."""
    members: tuple[str, ...] = ()
    """Names of the ranks, in order of rank."""


class StartWave(msgspec.Struct, frozen=True, cache_hash=True):
    """Rank to coordinator, and to its frontends if no other rank has joined: it is in the first exchange of this wave."""

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
    """Frontend to coordinator: it sent a request to this rank, although it believes that the group is idle."""

    engine: str
    epoch: int
    wave: int


class PeerLost(msgspec.Struct, frozen=True, cache_hash=True):
    """Rank to coordinator: a collective of this epoch failed."""

    engine: str
    epoch: int


class Reconfigure(msgspec.Struct, frozen=True, cache_hash=True):
    """Coordinator to a rank: join this group."""

    engine: str
    group: RankGroup
    wave: int
    """The group has no wave before this one."""
    pauses: Pauses
    """The newest pause state that the coordinator knows."""
    base: int = 0
    """Epoch that serves while the new group is prepared; its ranks switch together. 0 means to leave the current group
    at once.
    """
    target_size: int = 0
    """Target number of ranks. Ranks store it for a coordinator that has lost it. 0 if unknown."""


class PrepareFailed(msgspec.Struct, frozen=True, cache_hash=True):
    """Rank to coordinator: it cannot join the group of this epoch."""

    engine: str
    epoch: int


class RankReport(msgspec.Struct, frozen=True, cache_hash=True):
    """Rank to coordinator: its progress. Sent at registration, after an epoch's first exchange, and to renew its lease."""

    engine: str
    group: RankGroup
    place: Place
    pauses: Pauses
    running: bool
    """Whether the rank is in a wave."""
    opening: bool
    """Whether the epoch's first exchange has not ended yet."""
    prepared: int = 0
    """Epoch to which the rank is ready to switch, or 0 for none."""


class GroupView(msgspec.Struct, frozen=True, cache_hash=True):
    """Coordinator to frontends: the group to which they send requests."""

    group: RankGroup = RankGroup()
    wave: int = 0
    running: bool = False
    """Whether a rank reported that it is in the wave, and the wave's end was not reported."""
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
    """Whether the group waits for ranks and computes nothing meanwhile."""


class GroupRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """Data that a rank sends when it registers."""

    size: int
    """Number of ranks of the first group."""
    min_size: int
    """Minimum number of ranks with which the group continues."""
    waits: bool = False
    """Whether the group waits for a replacement of a lost rank."""
    meeting_address: str
    """host:port of the store at which ranks meet if this one is their first."""
    parallel_config: dict[str, str]
    """Settings that must be equal on all ranks, by name."""
    report: RankReport
    target_size: int = 0
    """Target number of ranks that it received last, or 0 for none."""
    max_size: int = 0
    """Maximum number of ranks: the number of experts, if ranks share experts. 0 means no limit."""
