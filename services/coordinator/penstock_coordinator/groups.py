"""Data-parallel groups of all pools: from what ranks say to what they are told."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from penstock_common.errors import FailedPrecondition, InvalidArgument
from penstock_common.observability.logging import get_logger
from penstock_common.types.cluster import EngineRegistration
from penstock_common.types.data_parallel import (
    FirstRequest,
    GroupRegistration,
    PeerLost,
    PoolGroup,
    PrepareFailed,
    RankReport,
    Reconfigure,
    StartDpWave,
    StartWave,
    WaveComplete,
    rank_name,
)
from penstock_coordinator.group import GroupMachine, ScaleRefused, Sent

# What is to be sent to one rank.


class Outbox:
    """Messages in order, for the stream that reads them."""

    def __init__(self) -> None:
        self._messages: deque[StartDpWave | Reconfigure] = deque()
        self._there = asyncio.Event()

    def put(self, message: StartDpWave | Reconfigure) -> None:
        """Send a message."""
        self._messages.append(message)
        self._there.set()

    async def next(self) -> StartDpWave | Reconfigure:
        """The next message, as soon as there is one."""
        while not self._messages:
            self._there.clear()
            await self._there.wait()
        return self._messages.popleft()


# The data-parallel group of one pool, from what its ranks say to what they are told.

RETRY_AFTER = 10.0
"""Seconds after a change that failed in which the group does not change its size again by itself."""

FromRank = StartWave | WaveComplete | RankReport | PeerLost | PrepareFailed
Send = Callable[[StartDpWave | Reconfigure], None]


class GroupOfPool:
    """Gives the machine of a group its events. Names are of ranks.

    ``target_size`` is where the group goes by itself: a rank that was lost is replaced as soon as there is another one. Ranks are
    told of it, and tell a coordinator that has started again.
    """

    def __init__(self, first: GroupRegistration, *, floor: int, send: Send) -> None:
        self.config = first.parallel_config
        self.target_size = first.size
        self._max_size = first.max_size
        self._remembered_in: int | None = None
        """The epoch of the rank whose word an earlier coordinator's target is."""
        self._machine = GroupMachine(first.size, first.min_size, waits=first.waits, floor=floor)
        self._send = send
        self._steer_at = 0.0

    @property
    def machine(self) -> GroupMachine:
        """The group's state."""
        return self._machine

    def view(self, model: str, pool: str) -> PoolGroup:
        """As frontends are told of it."""
        machine = self._machine
        return PoolGroup(
            model=model,
            pool=pool,
            view=machine.view,
            target_size=self.target_size,
            suspended=machine.suspended,
        )

    def check(self, registration: GroupRegistration) -> None:
        """Raise FailedPrecondition, naming the keys, for a rank that would compute something else than the others."""
        if not self._machine.known:
            return
        differing = _differing(self.config, registration.parallel_config)
        if differing:
            raise FailedPrecondition(
                f"register.group.parallel_config differs from that of the group's ranks: {differing}",
                field="register.group.parallel_config",
                reason="PARALLEL_CONFIG_DIFFERS",
            )

    def register(self, registration: GroupRegistration, now: float) -> None:
        """A rank is there, also one that was there before. The first one of a group says how large it is."""
        if not self._machine.known:
            self.config = registration.parallel_config
            self._max_size = registration.max_size
            if not registration.report.group.epoch:
                self.target_size = registration.size
                self._machine, _ = self._machine.founded(
                    registration.size, min_size=registration.min_size, waits=registration.waits
                )
        epoch, remembered = registration.report.group.epoch, registration.target_size
        if self._machine.recovering and remembered and epoch >= (self._remembered_in or 0):
            self._remembered_in, self.target_size = epoch, remembered
        self.take(registration.report, now)
        machine = self._machine
        if machine.recovering and not machine.highest and len(machine.known) >= machine.size:
            self.recovered(now)  # nobody knows an earlier coordinator: there was none

    def recovered(self, now: float) -> None:
        """One lease went by since the coordinator started."""
        if self._machine.recovering:
            if self._remembered_in is None:  # ranks of releases that are told no target
                self.target_size = max(self.target_size, len(self._machine.group.members))
            self._then(self._machine.recovered(), now)

    def take(self, message: FromRank | FirstRequest, now: float) -> None:
        """A rank, or a frontend, says something."""
        machine = self._machine
        match message:
            case StartWave():
                step = machine.start_wave(message)
            case WaveComplete():
                step = machine.wave_complete(message)
            case RankReport():
                step = machine.report(message)
            case PeerLost():
                get_logger().warning("a collective broke off", rank=message.engine, epoch=message.epoch)
                step = machine.peer_lost(message)
            case PrepareFailed():
                get_logger().warning("a rank cannot join", rank=message.engine, epoch=message.epoch)
                self._steer_at = now + RETRY_AFTER
                step = machine.prepare_failed(message)
            case FirstRequest():
                step = machine.first_request(message)
        self._then(step, now)

    def stream_broken(self, rank: str, now: float) -> None:
        """A rank's stream broke off."""
        self._then(self._machine.stream_broken(rank), now)

    def gone(self, rank: str, now: float) -> None:
        """A rank's lease is over, it has shut down, or makes no progress."""
        self._then(self._machine.gone(rank), now)

    def repeat(self, now: float) -> None:
        """Some time went by."""
        self._then(self._machine.repeat(), now)

    def scale(self, size: int, now: float) -> int:
        """Have so many ranks from now on. Returns how many there were to be before.

        Raises InvalidArgument below ``min_size`` and above what ranks can share, and FailedPrecondition while the group changes.
        One that waits for ranks that do not come does not: another size takes it out of that.
        """
        machine = self._machine
        if size < machine.min_size:
            raise InvalidArgument(
                f"replicas is {size}; the group's min_size is {machine.min_size}",
                field="replicas",
                reason="BELOW_MIN_SIZE",
            )
        if self._max_size and size > self._max_size:
            raise InvalidArgument(
                f"replicas is {size}; the group's ranks share the {self._max_size} experts of their model, so it has at most "
                f"{self._max_size}",
                field="replicas",
                reason="ABOVE_MAX_SIZE",
            )
        if machine.recovering or machine.standby.epoch or not machine.finished:
            raise FailedPrecondition("the group is changing its ranks; try again when it has", reason="RECONFIGURING")
        before, self.target_size = self.target_size, size
        self._steer_at = 0.0
        self._tell_target()
        self._steer(now)
        return before

    def _tell_target(self) -> None:
        """Ranks are told at once, since those who would be named with it may come much later, or not at all."""
        machine = self._machine
        for member in machine.group.members:
            self._tell(Reconfigure(member, machine.group, machine.waves.wave, machine.waves.pauses))

    def _tell(self, message: StartDpWave | Reconfigure) -> None:
        if isinstance(message, Reconfigure):
            message = msgspec.structs.replace(message, target_size=self.target_size)
        self._send(message)

    def _steer(self, now: float) -> None:
        """Go towards the target, as far as there are ranks for it."""
        machine = self._machine
        settled = machine.finished and not machine.recovering and not machine.standby.epoch
        size = max(min(self.target_size, len(machine.group.members) + len(machine.spares)), machine.min_size)
        if not settled or now < self._steer_at or size == len(machine.group.members):
            return
        self._machine, sent = machine.scale(size)
        for message in sent:
            if isinstance(message, ScaleRefused):
                get_logger().info("the group keeps its size for now", reason=message.reason)
            else:
                self._tell(message)

    def _then(self, step: tuple[GroupMachine, Sent], now: float) -> None:
        epoch, finished = self._machine.group.epoch, self._machine.finished
        self._machine, sent = step
        group = self._machine.group
        if group.epoch != epoch:
            get_logger().info("the group has another epoch", epoch=group.epoch, ranks=len(group.members))
        elif self._machine.finished and not finished:
            get_logger().info("all ranks are in the group", epoch=group.epoch, ranks=len(group.members))
        for message in sent:
            self._tell(message)
        self._steer(now)


def _differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    keys = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    return ", ".join(f"{key} is {theirs.get(key, 'missing')!r}, not {ours.get(key, 'missing')!r}" for key in keys)


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
