"""The data-parallel groups of all pools."""

from collections.abc import Callable, Mapping

from penstock_common.types.cluster import EngineRegistration
from penstock_common.types.data_parallel import FirstRequest, PoolGroup, Reconfigure, StartDpWave, rank_name
from penstock_coordinator.outbox import Outbox
from penstock_coordinator.pool_group import FromRank, GroupOfPool

PoolKey = tuple[str, str]
"""Model and pool."""
REPEAT_INTERVAL = 0.5
"""Seconds after which what may have been lost is said again."""


class Rank:
    """An engine that is a rank. ``outbox``: what its newest stream has to send."""

    def __init__(self, registration: EngineRegistration, meeting_address: str) -> None:
        self.name = rank_name(registration.engine_id, registration.incarnation)
        self.engine_id = registration.engine_id
        self.key: PoolKey = (registration.model, registration.pool)
        self.meeting_address = meeting_address
        self.outbox = Outbox()


class Groups:
    """Which engine is which rank, and the group of each pool. Times are seconds of one monotonic clock that callers pass in."""

    def __init__(self, *, recovered_at: float, floor: int, on_change: Callable[[], None]) -> None:
        """``recovered_at``: when ranks that knew an earlier coordinator have come back. ``floor``: an epoch that none of those
        can have given out. ``on_change``: called when there may be something to tell frontends.
        """
        self._recovered_at = recovered_at
        self._floor = floor
        self._on_change = on_change
        self._groups: dict[PoolKey, GroupOfPool] = {}
        self._ranks: dict[str, Rank] = {}
        """By engine id."""
        self._meetings: dict[str, str] = {}
        """By rank, where it can be met; of ranks that have left as well, until their groups have."""
        self._repeat_at = 0.0

    def views(self) -> tuple[PoolGroup, ...]:
        """As frontends are told of them."""
        return tuple(group.view(*key) for key, group in sorted(self._groups.items()))

    @property
    def meetings(self) -> Mapping[str, str]:
        """By rank, the address of its store."""
        return self._meetings

    def of(self, model: str, pool: str) -> GroupOfPool | None:
        """The group of a pool, if its engines are ranks."""
        return self._groups.get((model, pool))

    def scale(self, pool: str, size: int, now: float) -> int | None:
        """Have so many ranks in a pool, of whichever model. Returns how many there were to be before; None where it has no group.
        Raises as ``GroupOfPool.scale``.
        """
        group = next((group for (_, name), group in self._groups.items() if name == pool), None)
        if group is None:
            return None
        previous = group.scale(size, now)
        self._on_change()
        return previous

    def check(self, registration: EngineRegistration) -> None:
        """Raise FailedPrecondition for an engine that cannot be a rank of its pool's group."""
        group = self._groups.get((registration.model, registration.pool))
        if registration.group is not None and group is not None:
            group.check(registration.group)

    def register(self, registration: EngineRegistration, now: float) -> Rank | None:
        """An engine has registered. Returns the rank that it is, if it is one."""
        before = self._ranks.get(registration.engine_id)
        if registration.group is None:
            return None
        rank = Rank(registration, registration.group.meeting_address)
        self._ranks[registration.engine_id] = rank
        self._meetings[rank.name] = rank.meeting_address
        group = self._groups.get(rank.key)
        if group is None:
            group = self._groups[rank.key] = GroupOfPool(registration.group, floor=self._floor, send=self._send)
        if before is not None and before.name != rank.name:
            group.gone(before.name, now)
        group.register(registration.group, now)
        if now >= self._recovered_at:
            group.recovered(now)
        self._on_change()
        return rank

    def take(self, rank: Rank, message: FromRank, now: float) -> None:
        """A rank says something. A stream that another has replaced says nothing any more."""
        if self._ranks.get(rank.engine_id) is rank:
            self._groups[rank.key].take(message, now)
            self._on_change()

    def first_request(self, message: FirstRequest, now: float) -> None:
        """A request went to a rank of a group believed idle."""
        rank = next((rank for rank in self._ranks.values() if rank.name == message.engine), None)
        if rank is not None:
            self._groups[rank.key].take(message, now)
            self._on_change()

    def stream_broken(self, rank: Rank, now: float) -> None:
        """A rank's stream is over."""
        if self._ranks.get(rank.engine_id) is rank:
            self._groups[rank.key].stream_broken(rank.name, now)
            self._on_change()

    def gone(self, engine_id: str, now: float) -> None:
        """An engine has left, its lease is over, or it makes no progress. It may come back."""
        rank = self._ranks.get(engine_id)
        if rank is not None:
            self._groups[rank.key].gone(rank.name, now)
            self._on_change()

    def forget(self, engine_id: str) -> None:
        """An engine is no member any more."""
        rank = self._ranks.pop(engine_id, None)
        if rank is not None:
            del self._meetings[rank.name]

    def tick(self, now: float) -> None:
        """Some time went by."""
        if now < self._repeat_at:
            return
        self._repeat_at = now + REPEAT_INTERVAL
        for group in self._groups.values():
            if now >= self._recovered_at:
                group.recovered(now)
            group.repeat(now)
        if self._groups:
            self._on_change()

    def _send(self, message: StartDpWave | Reconfigure) -> None:
        for rank in self._ranks.values():
            if rank.name == message.engine:
                rank.outbox.put(message)
