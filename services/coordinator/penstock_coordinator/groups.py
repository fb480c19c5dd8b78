"""Data-parallel groups of all pools, which handle events from ranks and send messages to ranks."""

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

# The class below queues the messages to one rank.


class Outbox:
    """Queue of messages to one rank. The rank's stream takes the messages and sends them."""

    def __init__(self) -> None:
        self._messages: deque[StartDpWave | Reconfigure] = deque()
        self._there = asyncio.Event()

    def put(self, message: StartDpWave | Reconfigure) -> None:
        """Add a message to the rank."""
        self._messages.append(message)
        self._there.set()

    async def next(self) -> StartDpWave | Reconfigure:
        """Wait for the next message, remove it from the queue, and return it."""
        while not self._messages:
            self._there.clear()
            await self._there.wait()
        return self._messages.popleft()


# The class below manages the data-parallel group of one pool.

RETRY_AFTER = 10.0
"""Seconds to wait after a failed change before the group tries to change its size again."""

FromRank = StartWave | WaveComplete | RankReport | PeerLost | PrepareFailed
Send = Callable[[StartDpWave | Reconfigure], None]


class GroupOfPool:
    """Runs the state machine of a group. All names are names of ranks.

    ``target_size`` is the number of ranks that the group should have. If a rank is lost, another rank replaces the lost
    rank as soon as one is available. The coordinator sends the target to the ranks. If the coordinator restarts, the
    ranks report the target to the new process.
    """

    def __init__(self, first: GroupRegistration, *, floor: int, send: Send) -> None:
        self.config = first.parallel_config
        self.target_size = first.size
        self._max_size = first.max_size
        self._remembered_in: int | None = None
        """Epoch of the rank whose report has set ``target_size`` to the target of an earlier coordinator. None if no
        rank has reported such a target.
        """
        self._machine = GroupMachine(first.size, first.min_size, waits=first.waits, floor=floor)
        self._send = send
        self._steer_at = 0.0

    @property
    def machine(self) -> GroupMachine:
        """State machine of the group."""
        return self._machine

    def view(self, model: str, pool: str) -> PoolGroup:
        """Return the group's entry in views for frontends."""
        machine = self._machine
        return PoolGroup(
            model=model,
            pool=pool,
            view=machine.view,
            target_size=self.target_size,
            suspended=machine.suspended,
        )

    def check(self, registration: GroupRegistration) -> None:
        """Raise FailedPrecondition if a rank's configuration differs from the configuration of the other ranks.

        The error names the keys with different values.
        """
        if not self._machine.known:
            return
        differing = _differing(self.config, registration.parallel_config)
        if differing:
            raise FailedPrecondition(
                f"register.group.parallel_config differs from the configuration of the group's other ranks: {differing}",
                field="register.group.parallel_config",
                reason="PARALLEL_CONFIG_DIFFERS",
            )

    def register(self, registration: GroupRegistration, now: float) -> None:
        """Register a rank, which may already be registered in this group. The first rank sets the group's size."""
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
            self.recovered(now)  # no rank knows an earlier coordinator, so there was no earlier coordinator

    def recovered(self, now: float) -> None:
        """Handle the end of the recovery time, one lease after the start of the coordinator."""
        if self._machine.recovering:
            if self._remembered_in is None:  # ranks of older releases do not report a target
                self.target_size = max(self.target_size, len(self._machine.group.members))
            self._then(self._machine.recovered(), now)

    def take(self, message: FromRank | FirstRequest, now: float) -> None:
        """Handle a message from a rank or a frontend."""
        machine = self._machine
        match message:
            case StartWave():
                step = machine.start_wave(message)
            case WaveComplete():
                step = machine.wave_complete(message)
            case RankReport():
                step = machine.report(message)
            case PeerLost():
                get_logger().warning(
                    "a rank reported that a collective operation of its data-parallel group failed",
                    rank=message.engine,
                    epoch=message.epoch,
                )
                step = machine.peer_lost(message)
            case PrepareFailed():
                get_logger().warning(
                    "a rank cannot join its data-parallel group", rank=message.engine, epoch=message.epoch
                )
                self._steer_at = now + RETRY_AFTER
                step = machine.prepare_failed(message)
            case FirstRequest():
                step = machine.first_request(message)
        self._then(step, now)

    def stream_broken(self, rank: str, now: float) -> None:
        """Handle the end of a rank's stream."""
        self._then(self._machine.stream_broken(rank), now)

    def gone(self, rank: str, now: float) -> None:
        """Handle a lost rank: its lease has expired, or it has shut down, or it makes no progress."""
        self._then(self._machine.gone(rank), now)

    def repeat(self, now: float) -> None:
        """Send the messages again that may have been lost on the way to ranks. Called periodically."""
        self._then(self._machine.repeat(), now)

    def scale(self, size: int, now: float) -> int:
        """Set the target number of ranks. Return the previous target.

        Raises:
            InvalidArgument: ``size`` is below ``min_size``, or above the number of experts of the model.
            FailedPrecondition: The group is changing its ranks. A group that only waits for missing ranks accepts a new
                size.
        """
        machine = self._machine
        if size < machine.min_size:
            raise InvalidArgument(
                f"replicas is {size}; it must be at least the group's min_size, which is {machine.min_size}",
                field="replicas",
                reason="BELOW_MIN_SIZE",
            )
        if self._max_size and size > self._max_size:
            raise InvalidArgument(
                f"replicas is {size}; it must be at most {self._max_size}, because each rank needs at least one of the "
                f"model's {self._max_size} experts",
                field="replicas",
                reason="ABOVE_MAX_SIZE",
            )
        if machine.recovering or machine.standby.epoch or not machine.finished:
            raise FailedPrecondition(
                "the data-parallel group is changing its number of ranks; try again when this change is complete",
                reason="RECONFIGURING",
            )
        before, self.target_size = self.target_size, size
        self._steer_at = 0.0
        self._tell_target()
        self._steer(now)
        return before

    def _tell_target(self) -> None:
        """Send the target to the ranks now.

        The next message about a new group would also contain the target, but that message may be sent much later or
        never.
        """
        machine = self._machine
        for member in machine.group.members:
            self._tell(Reconfigure(member, machine.group, machine.waves.wave, machine.waves.pauses))

    def _tell(self, message: StartDpWave | Reconfigure) -> None:
        if isinstance(message, Reconfigure):
            message = msgspec.structs.replace(message, target_size=self.target_size)
        self._send(message)

    def _steer(self, now: float) -> None:
        """Change the group's size towards the target, as far as ranks are available."""
        machine = self._machine
        settled = machine.finished and not machine.recovering and not machine.standby.epoch
        size = max(min(self.target_size, len(machine.group.members) + len(machine.spares)), machine.min_size)
        if not settled or now < self._steer_at or size == len(machine.group.members):
            return
        self._machine, sent = machine.scale(size)
        for message in sent:
            if isinstance(message, ScaleRefused):
                get_logger().info(
                    "postponed a change of the number of ranks in a data-parallel group", reason=message.reason
                )
            else:
                self._tell(message)

    def _then(self, step: tuple[GroupMachine, Sent], now: float) -> None:
        epoch, finished = self._machine.group.epoch, self._machine.finished
        self._machine, sent = step
        group = self._machine.group
        if group.epoch != epoch:
            get_logger().info(
                "membership of a data-parallel group changed", epoch=group.epoch, ranks=len(group.members)
            )
        elif self._machine.finished and not finished:
            get_logger().info("all ranks joined the data-parallel group", epoch=group.epoch, ranks=len(group.members))
        for message in sent:
            self._tell(message)
        self._steer(now)


def _differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    keys = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    return ", ".join(f"{key} is {theirs.get(key, 'missing')!r}, not {ours.get(key, 'missing')!r}" for key in keys)


PoolKey = tuple[str, str]
"""Model name and pool name."""
REPEAT_INTERVAL = 0.5
"""Seconds after which messages that may have been lost are sent again."""


class Rank:
    """An engine that is a rank. ``outbox`` has the messages for the rank's latest stream."""

    def __init__(self, registration: EngineRegistration, meeting_address: str) -> None:
        self.name = rank_name(registration.engine_id, registration.incarnation)
        self.engine_id = registration.engine_id
        self.key: PoolKey = (registration.model, registration.pool)
        self.meeting_address = meeting_address
        self.outbox = Outbox()


class Groups:
    """Maps engines to ranks, and stores the group of each pool.

    Callers pass the time as seconds of a monotonic clock.
    """

    def __init__(self, *, recovered_at: float, floor: int, on_change: Callable[[], None]) -> None:
        """Create the groups.

        ``recovered_at`` is the time by which ranks of an earlier coordinator have reconnected. ``floor`` is an epoch
        that is higher than all epochs of earlier coordinators. ``on_change`` is called when frontends may need a new
        view.
        """
        self._recovered_at = recovered_at
        self._floor = floor
        self._on_change = on_change
        self._groups: dict[PoolKey, GroupOfPool] = {}
        self._ranks: dict[str, Rank] = {}
        """Ranks by engine id."""
        self._meetings: dict[str, str] = {}
        """Address of each rank's rendezvous store. The entry of a rank that has left stays until the rank's group has
        ended.
        """
        self._repeat_at = 0.0

    def views(self) -> tuple[PoolGroup, ...]:
        """Return the groups' entries in views for frontends."""
        return tuple(group.view(*key) for key, group in sorted(self._groups.items()))

    @property
    def meetings(self) -> Mapping[str, str]:
        """Address of the rendezvous store of each rank, by rank name."""
        return self._meetings

    def of(self, model: str, pool: str) -> GroupOfPool | None:
        """Return the group of a pool, or None if the pool's engines are not ranks."""
        return self._groups.get((model, pool))

    def scale(self, pool: str, size: int, now: float) -> int | None:
        """Set the target number of ranks of the group of a pool, whatever its model is.

        Returns the previous target, or None if the pool has no group. Raises the errors of ``GroupOfPool.scale``.
        """
        group = next((group for (_, name), group in self._groups.items() if name == pool), None)
        if group is None:
            return None
        previous = group.scale(size, now)
        self._on_change()
        return previous

    def check(self, registration: EngineRegistration) -> None:
        """Raise FailedPrecondition if an engine cannot be a rank of its pool's group."""
        group = self._groups.get((registration.model, registration.pool))
        if registration.group is not None and group is not None:
            group.check(registration.group)

    def register(self, registration: EngineRegistration, now: float) -> Rank | None:
        """Register an engine. Return the engine's rank, or None if the engine is not a rank."""
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
        """Handle a message from a rank. Ignore messages of a stream that was replaced by a newer stream."""
        if self._ranks.get(rank.engine_id) is rank:
            self._groups[rank.key].take(message, now)
            self._on_change()

    def first_request(self, message: FirstRequest, now: float) -> None:
        """Handle a request that a frontend sent to a rank, while the frontend considered the rank's group idle."""
        rank = next((rank for rank in self._ranks.values() if rank.name == message.engine), None)
        if rank is not None:
            self._groups[rank.key].take(message, now)
            self._on_change()

    def stream_broken(self, rank: Rank, now: float) -> None:
        """Handle the end of a rank's stream."""
        if self._ranks.get(rank.engine_id) is rank:
            self._groups[rank.key].stream_broken(rank.name, now)
            self._on_change()

    def gone(self, engine_id: str, now: float) -> None:
        """Handle an engine that has left, has lost its lease, or makes no progress. The engine may return later."""
        rank = self._ranks.get(engine_id)
        if rank is not None:
            self._groups[rank.key].gone(rank.name, now)
            self._on_change()

    def forget(self, engine_id: str) -> None:
        """Remove an engine that is no longer a member."""
        rank = self._ranks.pop(engine_id, None)
        if rank is not None:
            del self._meetings[rank.name]

    def tick(self, now: float) -> None:
        """Send messages again that may have been lost, if the interval has passed."""
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
