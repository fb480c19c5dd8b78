"""Driver of a data-parallel rank. The driver passes events to the rank's state machine and carries out the effects."""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import msgspec

from penstock_common.errors import FailedPrecondition, Unavailable
from penstock_common.types.data_parallel import (
    PauseMode,
    PeerLost,
    PrepareFailed,
    RankReport,
    StartDpWave,
    StartWave,
    WaveComplete,
)
from penstock_common.types.outputs import EngineCoreOutputs, RequestError
from penstock_enginecore.core.collective_errors import CollectiveBroken, UnpreparedError
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.core.scheduler.base import Clock, PauseState
from penstock_enginecore.core.steps_in_flight import DrainAborts
from penstock_enginecore.data_parallel.core.group_channels import (
    Broke,
    Connected,
    Gathered,
    GroupEvent,
    Links,
    Named,
    Refused,
    SharedExperts,
)
from penstock_enginecore.data_parallel.core.rank import (
    AbortCollective,
    Effect,
    Effects,
    Exchange,
    Forward,
    Hold,
    Join,
    Leave,
    Phase,
    Prepare,
    Rank,
    Release,
    ResumeRefused,
    RollBack,
    pack_row,
    unpack_row,
)

# Durations of changes of a group's members. During such a change, a rank computes no steps.


class Standstill:
    """Measures the time in which a rank computes no steps: during planned changes of the group, and after losses of ranks.

    Both kinds of intervals end with the first exchange of the new group. The interval of a planned change begins with
    the exchange in which all ranks agree to switch, when the old group's last step has ended. The interval of a loss
    begins when this rank detects the loss, even during a planned change.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._step_ended_at = 0.0
        self._switching_since: float | None = None
        self._lost_at: float | None = None
        self.num_switches = self.num_recoveries = 0
        """Number of completed planned changes, and number of losses after which the rank has a group again."""
        self.switch_seconds = self.recovery_seconds = 0.0
        """Total duration of planned changes, and total time without steps after losses, both in seconds."""

    @property
    def seconds_since_loss(self) -> float:
        """Seconds since the rank lost its group, or 0 if the rank has a group."""
        return 0.0 if self._lost_at is None else self._clock() - self._lost_at

    def exchanging(self) -> None:
        """Record that an exchange begins, which means that the step before the exchange has ended."""
        self._step_ended_at = self._clock()

    def switching(self) -> None:
        """Record that, in this exchange, all ranks agreed to switch to the next group."""
        self._switching_since = self._step_ended_at

    def lost(self) -> None:
        """Record the loss of the group. Further calls have no effect until the first exchange of the next group has
        ended.
        """
        self._switching_since = None
        if self._lost_at is None:
            self._lost_at = self._clock()

    def opened(self) -> bool:
        """Record the end of a group's first exchange. Return whether the previous group was lost."""
        now = self._clock()
        if self._switching_since is not None:
            self.num_switches += 1
            self.switch_seconds += now - self._switching_since
        recovered = self._lost_at is not None
        if self._lost_at is not None:
            self.num_recoveries += 1
            self.recovery_seconds += now - self._lost_at
        self._switching_since = self._lost_at = None
        return recovered


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a rank and its group, for metrics.

    Attributes:
        recovery_seconds: Total time from the loss of a group to the first exchange of the next group, in seconds.
        switch_seconds: Total duration of planned changes in seconds, each from the end of the old group's last step to
            the end of the new group's first exchange.
        exchange_seconds: Total time in exchanges in seconds, including the time in which this rank waits for others.
        expert_balance: Mean load of the ranks' experts divided by the highest load, or None without expert parallelism.
        num_experts_moved: Number of experts moved to this rank for load balance, or None without expert parallelism.
    """

    epoch: int = 0
    num_ranks: int = 0
    rank: int | None = None
    suspended: bool = True
    num_dummy_steps: int = 0
    num_recoveries: int = 0
    recovery_seconds: float = 0.0
    num_switches: int = 0
    switch_seconds: float = 0.0
    num_exchanges: int = 0
    exchange_seconds: float = 0.0
    expert_balance: float | None = None
    num_experts_moved: int | None = None


logger = logging.getLogger(__name__)

REPEAT_INTERVAL = 0.5
"""Time after which the rank repeats a message that may have been lost, in seconds."""

ToCoordinator = StartWave | WaveComplete | PeerLost | PrepareFailed | RankReport


class GroupDriver:
    """Interface through which the busy loop uses a rank. Only the busy loop's thread may call the methods, except for
    the methods under "From any thread". The loop passes events to the driver, and runs a step whenever ``wants_step``
    is true. Exchanges run on separate threads, one for each link to a group, so the loop continues to process input
    while this rank waits for other ranks.
    """

    def __init__(
        self,
        engine_name: str,
        engine: EngineCore,
        links: Links,
        *,
        experts: SharedExperts | None = None,
        prefill_interval: int = 1,
        move_after: float = 10.0,
        clock: Clock = time.monotonic,
    ) -> None:
        """Create the driver.

        Args:
            engine_name: Name of the rank.
            engine: The engine.
            links: Connections to other ranks.
            experts: Experts that are distributed over the ranks, or None. When a link has connected, it prepares the
                experts.
            prefill_interval: Number of steps from one step in which requests may start to the next such step.
            move_after: Time in seconds after which requests are moved to other engines if the group computes no steps.
            clock: Function that returns monotonic seconds.
        """
        self.links = links
        self.to_coordinator: Callable[[ToCoordinator], None] = lambda _: None
        self.to_frontends: Callable[[StartWave], None] = lambda _: None
        self._rank = Rank(engine_name)
        self._experts = experts
        self._prefill_interval = prefill_interval
        self._move_after = move_after
        self._engine = engine
        self._scheduler = engine.scheduler
        self._clock = clock
        self._meetings: Mapping[str, str] = {}
        self._forward: Forward | None = None
        self._pausing: list[Future[None]] = []
        self._resume_refused = False
        self._repeat_at = clock() + REPEAT_INTERVAL
        self._standstill = Standstill(clock)
        self._num_dummy_steps = 0
        self._exchanged = (0, 0.0)

    # From any thread: methods that any thread may call.

    def named(self, event: Named) -> None:
        """Handle the announcement of a group. If the new group replaces the current group immediately, collectives of
        older groups are aborted.
        """
        if not event.message.base:
            self.links.give_up_before(event.message.group.epoch)
        self.links.post(event)

    def refused(self, epoch: int, wave: int) -> None:
        """Handle a request that was refused before it reached the busy loop. The frontend of the request may already
        have told other ranks to join a wave.
        """
        self.links.post(Refused(epoch, wave))

    @property
    def report(self) -> RankReport:
        """The rank's current state, for the coordinator."""
        return self._rank.report

    @property
    def state(self) -> GroupState:
        """State of this rank and its group, for metrics."""
        rank, standstill = self._rank, self._standstill
        members = rank.group.members
        return GroupState(
            epoch=rank.group.epoch,
            num_ranks=len(members),
            rank=members.index(rank.engine) if rank.engine in members else None,
            suspended=rank.phase in (Phase.OUTSIDE, Phase.BROKEN),
            num_dummy_steps=self._num_dummy_steps,
            num_recoveries=standstill.num_recoveries,
            recovery_seconds=standstill.recovery_seconds,
            num_switches=standstill.num_switches,
            switch_seconds=standstill.switch_seconds,
            num_exchanges=self._exchanged[0],
            exchange_seconds=self._exchanged[1],
            expert_balance=None if self._experts is None else self._experts.balance,
            num_experts_moved=None if self._experts is None else self._experts.num_moved,
        )

    # Methods that only the busy loop's thread calls.

    @property
    def wants_step(self) -> bool:
        """Whether the ranks have agreed to compute a step now."""
        return self._forward is not None

    @property
    def seconds_to_repeat(self) -> float:
        """Time in seconds until ``look`` should be called."""
        return max(self._repeat_at - self._clock(), 0.0)

    def look(self) -> None:
        """Between steps, end requests whose deadline has passed, and repeat messages that may have been lost."""
        self._scheduler.end_expired()
        self._move_from_standstill()
        self.settle()
        if self._clock() < self._repeat_at:
            return
        self._repeat_at = self._clock() + REPEAT_INTERVAL
        rank, effects = self._rank.repeat()
        for effect in effects:
            if isinstance(effect, StartWave):
                self.to_frontends(effect)
        self._apply(rank, effects)

    def _move_from_standstill(self) -> None:
        if self._rank.phase is not Phase.BROKEN:
            return
        if self._standstill.seconds_since_loss >= self._move_after and self._scheduler.has_requests:
            failure = Unavailable(
                "the data-parallel group of this rank has lost a member and is suspended", reason="GROUP_SUSPENDED"
            )
            self._scheduler.abort_all(RequestError.from_exception(failure), keep_blocks=True)

    def added(self, epoch: int, wave: int, *, refused: bool = False) -> None:
        """Handle a new request, after the scheduler has queued or refused it."""
        self._apply(*self._rank.add(epoch, wave, refused=refused))

    def take(self, event: GroupEvent) -> None:
        """Handle an event of the group, such as the end of an exchange."""
        rank = self._rank
        match event:
            case Gathered(epoch, rows, seconds):
                self._exchanged = (self._exchanged[0] + 1, self._exchanged[1] + seconds)
                if epoch == rank.group.epoch and rank.phase is Phase.EXCHANGE:
                    self._gathered(rows)
            case Connected(epoch):
                self._apply(*rank.prepared(epoch))
            case Broke(epoch, why, unprepared):
                self._broke(epoch, why, unprepared=unprepared)
            case Named(message, meetings):
                self._meetings = {**self._meetings, **meetings}
                self._apply(*rank.reconfigure(message))
            case Refused(epoch, wave):
                self.added(epoch, wave, refused=True)
            case StartDpWave():
                self._apply(*rank.start_dp_wave(event))

    def _gathered(self, rows: list[bytes]) -> None:
        opened = self._rank.opening
        if opened:  # All ranks have switched to this epoch, so no rank is in a collective of an earlier epoch.
            self.links.close_before(self._rank.group.epoch)
            if not self._joined(self._rank.group.epoch):
                return
        rank, effects = self._rank.gathered([unpack_row(row) for row in rows])
        if rank.opening:
            self._standstill.switching()
        self._apply(rank, effects)
        if opened and self._standstill.opened():
            logger.info("the data-parallel group of this rank works again after a failure epoch=%d", rank.group.epoch)

    def _joined(self, epoch: int) -> bool:
        """Switch the experts to the group of this epoch. Return False if the switch fails."""
        if self._experts is None:
            return True
        try:
            self._experts.join(epoch, self.links.link(epoch))
        except UnpreparedError as e:
            self._broke(epoch, str(e), unprepared=True)
            return False
        return True

    def _broke(self, epoch: int, why: str, *, unprepared: bool = False) -> None:
        rank = self._rank
        if epoch == rank.standby.epoch and not rank.ready:
            logger.warning("this rank cannot join its data-parallel group epoch=%d reason=%s", epoch, why)
            self._apply(*rank.prepare_failed(epoch))
        elif epoch == rank.group.epoch:
            logger.warning(
                "a collective operation of this rank's data-parallel group failed epoch=%d reason=%s", epoch, why
            )
            # Abort the group, because other ranks would wait for results that this rank does not compute.
            self.links.give_up_before(epoch + 1)
            self._standstill.lost()
            self._apply(*rank.peer_lost())
            if unprepared:
                self.to_coordinator(PrepareFailed(rank.engine, epoch))

    def step(self, drain_aborts: DrainAborts) -> dict[str, EngineCoreOutputs]:
        """Compute the step on which the ranks agreed. Return the step's outputs by the id of the frontend."""
        forward, self._forward = self._forward, None
        if forward is None:
            raise RuntimeError("step was called, but the ranks have not agreed on a step")
        self._num_dummy_steps += forward.dummy
        try:
            self._engine.step_together(drain_aborts, begin=forward.step % self._prefill_interval == 0)
        except CollectiveBroken as e:
            self._broke(forward.epoch, str(e))
            return self._scheduler.take_outputs()
        self.settle()
        self._apply(*self._rank.stepped(unfinished=self._counts()[0] > 0))
        return self._scheduler.take_outputs()

    def settle(self) -> None:
        """Tell the state machine if the rank's last unfinished or held request has ended, and complete pending calls of
        ``pause``.
        """
        rank, scheduler = self._rank, self._scheduler
        if rank.paused and scheduler.pause_state is not PauseState.PAUSED:
            scheduler.pause(PauseState.PAUSED)
        unfinished, held = self._counts()
        if (rank.unfinished and not unfinished) or (rank.held and not held):
            self._apply(*rank.left_with(unfinished=rank.unfinished and unfinished > 0, held=rank.held and held > 0))
        if self._pausing and (rank.paused or not rank.pauses.on):
            waiting, self._pausing = self._pausing, []
            for done in waiting:
                if rank.paused:
                    done.set_result(None)
                else:
                    done.set_exception(Unavailable("the group was resumed before it had paused", reason="RESUMED"))

    def _counts(self) -> tuple[int, int]:
        """Return the number of requests that steps advance, and the number of requests that wait for a resume."""
        requests = self._scheduler.num_requests
        paused = self._scheduler.pause_state is PauseState.PAUSED
        held = requests if paused else self._scheduler.num_held_by_pause
        return requests - held, held

    # Pauses and resumes of the group.

    def pause(self, mode: PauseMode) -> "Future[None]":
        """Pause the group. The returned Future completes when all ranks know about the pause and no step will run
        before a resume.
        """
        done: Future[None] = Future()
        self._pausing.append(done)
        self._apply(*self._rank.pause(self._rank.pauses.pause(mode)))
        self.settle()
        return done

    def resume(self) -> None:
        """Resume the group. Raises FailedPrecondition while the pause is not complete."""
        self._resume_refused = False
        self._apply(*self._rank.resume(self._rank.pauses.resume()))
        if self._resume_refused:
            raise FailedPrecondition(
                "the group is still pausing; call resume after pause has returned", reason="PAUSE_PENDING"
            )
        self.settle()

    # Effects of the state machine, which the driver carries out.

    def _apply(self, rank: Rank, effects: Effects) -> None:
        self._rank = rank
        for effect in effects:
            self._do(effect)

    def _do(self, effect: Effect) -> None:
        match effect:
            case Exchange(group, row):
                self._standstill.exchanging()
                self.links.exchange(group.epoch, pack_row(row))
            case Forward():
                self._forward = effect
            case RollBack():
                self._forward = (
                    # The agreed step has not begun, because the loop processes a step's results before any other event.
                    None
                )
            case AbortCollective():
                self.links.give_up_before(self._rank.group.epoch)
                self._standstill.lost()
            case Hold(mode):
                self._hold(mode)
            case Release():
                self._scheduler.pause(PauseState.RUNNING)
            case ResumeRefused():
                self._resume_refused = True
            case Prepare(group) if self._rank.engine in group.members:
                self.links.open(group, self._meetings)
            case Prepare(group):  # A leaving rank has nothing to prepare.
                self.links.post(Connected(group.epoch))
            case Join(group):
                self._leave_experts()
                self.links.open(group, self._meetings)
                self._meetings = {rank: self._meetings[rank] for rank in group.members if rank in self._meetings}
                logger.info(
                    "this rank joined its data-parallel group epoch=%d ranks=%d", group.epoch, len(group.members)
                )
            case Leave():
                self._leave()
            case _:
                self.to_coordinator(effect)

    def _hold(self, mode: PauseMode) -> None:
        if mode is PauseMode.ABORT:
            failure = Unavailable("an operator paused the engine", reason="PAUSED", retry_after=1.0)
            self._scheduler.abort_all(RequestError.from_exception(failure), held=False)
        if self._scheduler.pause_state is PauseState.RUNNING:
            self._scheduler.pause(PauseState.DRAINING)

    def _leave(self) -> None:
        logger.info("this rank left its data-parallel group")
        self._forward = None
        self._leave_experts()
        self.links.close()
        failure = Unavailable("the rank has left its data-parallel group", reason="LEFT_GROUP")
        self._scheduler.abort_all(RequestError.from_exception(failure), keep_blocks=True)

    def _leave_experts(self) -> None:
        if self._experts is not None:
            self._experts.leave()
