"""What the ranks of a data-parallel group, their coordinator and their frontends tell each other.

A rank is an engine of the group. It is named by its engine id and its incarnation together, so that a restarted engine is
another rank.
"""

import enum

import msgspec

_SEPARATOR = "#"


def rank_name(engine_id: str, incarnation: str) -> str:
    """The rank that an engine is from one start to its end."""
    return f"{engine_id}{_SEPARATOR}{incarnation}"


def engine_of(rank: str) -> tuple[str, str]:
    """Engine id and incarnation of a rank. Incarnations have no "#"."""
    engine_id, _, incarnation = rank.rpartition(_SEPARATOR)
    return engine_id, incarnation


class PauseMode(enum.IntEnum):
    """What becomes of requests when a group pauses. The stronger of two modes is the larger; on the wire they are
    ``penstock.common.v1.PauseMode``.
    """

    NONE = 0
    """The group is not paused."""
    WAIT = 1
    """They finish first."""
    KEEP = 2
    """They freeze, and go on at resume."""
    ABORT = 3
    """They end as ABORT."""


class Pauses(msgspec.Struct, frozen=True, order=True, cache_hash=True, gc=False):
    """Turns of pause and resume, and the mode of the pause that is on. The greater of two is the newer or the stronger one."""

    number: int = 0
    """Odd while a pause is on."""
    mode: PauseMode = PauseMode.NONE

    @property
    def on(self) -> bool:
        """Whether a pause is on."""
        return self.number % 2 == 1

    def pause(self, mode: PauseMode) -> "Pauses":
        """The pause that follows, or this one made stronger."""
        return Pauses(self.number, max(self.mode, mode)) if self.on else Pauses(self.number + 1, mode)

    def resume(self) -> "Pauses":
        """The resume that follows, or this one."""
        return Pauses(self.number + 1) if self.on else self


class Place(msgspec.Struct, frozen=True, order=True, cache_hash=True, gc=False):
    """Where a rank is. Places of one rank never go back."""

    epoch: int = 0
    """Memberships of the group."""
    wave: int = 0
    """Transitions from running to idle."""
    step: int = 0
    """Forward passes of the wave."""
    pauses: int = 0
    """Turns of pause and resume."""


class RankGroup(msgspec.Struct, frozen=True, cache_hash=True):
    """Who computes together in an epoch."""

    epoch: int = 0
    """0: no group."""
    members: tuple[str, ...] = ()
    """In order of their ranks."""


class StartWave(msgspec.Struct, frozen=True, cache_hash=True):
    """Rank to coordinator, and to its frontends where nobody has come yet: it is in the first exchange of this wave."""

    engine: str
    epoch: int
    wave: int
    pauses: Pauses


class WaveComplete(msgspec.Struct, frozen=True, cache_hash=True):
    """Rank 0 to coordinator: this wave is over, and all are idle."""

    engine: str
    epoch: int
    wave: int
    pauses: Pauses


class StartDpWave(msgspec.Struct, frozen=True, cache_hash=True):
    """Coordinator or frontend to a rank: be in this wave."""

    engine: str
    epoch: int
    wave: int
    pauses: Pauses


class FirstRequest(msgspec.Struct, frozen=True, cache_hash=True):
    """Frontend to coordinator: a request went to this rank of a group believed idle."""

    engine: str
    epoch: int
    wave: int


class PeerLost(msgspec.Struct, frozen=True, cache_hash=True):
    """Rank to coordinator: a collective of this epoch broke off."""

    engine: str
    epoch: int


class Reconfigure(msgspec.Struct, frozen=True, cache_hash=True):
    """Coordinator to a rank: be in this group."""

    engine: str
    group: RankGroup
    wave: int
    """No wave of the group is before this one."""
    pauses: Pauses
    """The newest that the coordinator has heard of."""
    base: int = 0
    """The epoch that serves while the group is prepared, whose ranks switch together; 0: leave whatever there is, at once."""
    target_size: int = 0
    """How many ranks the group shall have, which ranks keep for a coordinator that has forgotten it; 0: unknown."""


class PrepareFailed(msgspec.Struct, frozen=True, cache_hash=True):
    """Rank to coordinator: it cannot be in the group of this epoch."""

    engine: str
    epoch: int


class RankReport(msgspec.Struct, frozen=True, cache_hash=True):
    """Rank to coordinator: where it is; at its registration, after an epoch's first exchange, and to keep its lease."""

    engine: str
    group: RankGroup
    place: Place
    pauses: Pauses
    running: bool
    """Whether it is in a wave."""
    opening: bool
    """Whether the epoch's first exchange is not over yet."""
    prepared: int = 0
    """The epoch that it could switch to; 0: none."""


class GroupView(msgspec.Struct, frozen=True, cache_hash=True):
    """Coordinator to frontends: the group they send requests to."""

    group: RankGroup = RankGroup()
    wave: int = 0
    running: bool = False
    """Whether a rank was seen in the wave, and its end was not."""
    pauses: Pauses = Pauses()
    routed: tuple[str, ...] = ()
    """The members that take new requests."""


class PoolGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The group of a pool, as views have it."""

    model: str
    pool: str
    view: GroupView
    target_size: int = 0
    """How many ranks it shall have."""
    suspended: bool = False
    """Whether it waits for ranks, and computes nothing meanwhile."""


class GroupRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank brings along when it registers."""

    size: int
    """Ranks of the first group."""
    min_size: int
    """Fewest ranks that the group goes on with."""
    waits: bool = False
    """Whether the group waits for a replacement of a rank that it has lost."""
    meeting_address: str
    """host:port of the store where ranks meet if this one is their first."""
    parallel_config: dict[str, str]
    """What must be the same on all ranks, by name."""
    report: RankReport
    target_size: int = 0
    """How many ranks the group shall have, as it was told last; 0: it was told none."""
    max_size: int = 0
    """Ranks that the group may have at most: as many as the model has experts, which its ranks share; 0: any number."""
