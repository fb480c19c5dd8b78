"""A rank of a data-parallel group as a state machine. The ranks of a group compute every step together."""

import enum
import struct
from collections.abc import Sequence
from typing import Self

import msgspec

from penstock_common.types.data_parallel import (
    PauseMode,
    Pauses,
    PeerLost,
    Place,
    PrepareFailed,
    RankGroup,
    RankReport,
    Reconfigure,
    StartDpWave,
    StartWave,
    WaveComplete,
)

# The row that a rank contributes to an exchange.


class Row(msgspec.Struct, frozen=True, cache_hash=True):
    """Row that a rank contributes to the all-gather of an exchange. A row that was sent does not change. Events after
    that are in the rank's next row.
    """

    epoch: int
    wave: int
    step: int
    unfinished: bool
    """Whether the rank has a request that a step would advance."""
    pauses: Pauses
    """The newest pause or resume of which the rank has been told."""
    prepared: int = 0
    """Number of the epoch for which the rank is prepared, so that it can switch to this epoch, or 0."""


# Effects that a rank's driver carries out. Messages to the coordinator are effects too, but are defined elsewhere.


class Exchange(msgspec.Struct, frozen=True):
    """Effect: enter the exchange with this row, then call ``Rank.gathered`` with the result."""

    group: RankGroup
    row: Row


class Forward(msgspec.Struct, frozen=True):
    """Effect: run the forward pass of a step, with a dummy batch if the rank has nothing to compute. Then call
    ``Rank.stepped``.
    """

    epoch: int
    wave: int
    step: int
    pauses: Pauses
    """The pause state under which all ranks compute the step."""
    dummy: bool


class AbortCollective(msgspec.Struct, frozen=True):
    """Effect: abort the collective in which this rank waits, because other ranks may never join the collective."""


class RollBack(msgspec.Struct, frozen=True):
    """Effect: undo the step in flight, including its tokens and the blocks that it cached."""


class Hold(msgspec.Struct, frozen=True):
    """Effect: hold new requests. Existing requests finish, freeze or end, as the mode of the pause says."""

    mode: PauseMode


class Release(msgspec.Struct, frozen=True):
    """Effect: let held and frozen requests run again."""


class ResumeRefused(msgspec.Struct, frozen=True):
    """Effect: report that a resume was refused, because the pause is not complete."""

    pauses: Pauses


class Prepare(msgspec.Struct, frozen=True):
    """Effect: prepare this group while the current group serves. Then call ``Rank.prepared`` or
    ``Rank.prepare_failed``.
    """

    group: RankGroup


class Join(msgspec.Struct, frozen=True):
    """Effect: make this group the rank's current group."""

    group: RankGroup


class Leave(msgspec.Struct, frozen=True):
    """Effect: leave the group. The rank's requests end on this engine, and resume on other engines."""


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


# Agreement of the ranks in an exchange.


class Agreement(msgspec.Struct, frozen=True):
    """The result of an exchange, which is the same for every rank."""

    wave: int
    pauses: Pauses
    run: bool
    """Whether all ranks compute a step now. False means that the wave has ended."""
    switch_to: int
    """Number of the epoch to which all ranks switch now, or 0."""


def agree(rows: Sequence[Row]) -> Agreement:
    """Return what the ranks agree on in an exchange, as a pure function of the rows of all ranks.

    The newest pause or resume that any rank knows applies to all ranks. After a pause with mode WAIT, the wave
    continues until no rank has work. The next epoch begins when every rank is prepared for it.
    """
    pauses = max(row.pauses for row in rows)
    prepared = {row.prepared for row in rows}
    switch_to = prepared.pop() if len(prepared) == 1 else 0
    stopped = pauses.on and pauses.mode is not PauseMode.WAIT
    return Agreement(
        wave=max(row.wave for row in rows),
        pauses=pauses,
        run=not stopped and not switch_to and any(row.unfinished for row in rows),
        switch_to=switch_to,
    )


Effects = tuple[Effect, ...]
_NO_GROUP = RankGroup()


class Phase(enum.Enum):
    """Phase of a rank. Each value completes the sentence "the rank is in ..."."""

    OUTSIDE = "no group"
    IDLE = "no wave"
    EXCHANGE = "an exchange"
    FORWARD = "a forward pass"
    BROKEN = "a group in which a collective failed"


class Rank(msgspec.Struct, frozen=True, cache_hash=True):
    """State of a rank. Each method handles an event, and returns the next state and the effects to carry out, in order.

    Either all ranks of a group run or all ranks are idle, because a step needs every rank. A wave begins with an
    exchange, which is a small all-gather on the CPU. In a wave, there is another exchange before every ``interval``-th
    step. A rank decides from the rows of the last exchange whether to enter a collective. All ranks have the same rows,
    so they decide the same. The wave ends when no row says that its rank has work.

    An idle rank enters the first exchange of a wave for one of three reasons: it has work, it has news, or another rank
    started the wave. News is a pause, a resume, or a standby group that was not yet in an exchange. It is enough if one
    rank knows the news: this rank need not reach all other ranks or stay alive. While a rank waits in a first exchange,
    it repeats its announcement (``repeat``), and every idle rank that receives the announcement joins. A paused rank
    joins as well, but no step runs during a pause. While a rank waits in an exchange, it handles all other events.

    A group changes in one of two ways. A planned change is prepared while the current group serves. All ranks switch
    after the exchange in which every row says that the rank is prepared. Any other change is immediate: the rank aborts
    the collective in which it waits, and undoes its step in flight. After both kinds of changes, the new group begins
    with an exchange. Each rank then uses the maximum wave and the newest pause of all ranks.
    """

    engine: str
    interval: int = 1
    """Number of steps between two exchanges."""
    group: RankGroup = _NO_GROUP
    phase: Phase = Phase.OUTSIDE
    wave: int = 0
    step: int = 0
    pauses: Pauses = Pauses()
    """The newest pause or resume that the rank knows."""
    agreed: Pauses = Pauses()
    """The pause or resume on which all ranks agreed in the last exchange."""
    opening: bool = False
    """Whether the current exchange is the first exchange of the epoch."""
    unfinished: bool = False
    """Whether the rank has requests that steps advance."""
    held: bool = False
    """Whether the rank has requests that wait for a resume."""
    start_at: int = 0
    """Number of a later wave that was announced during the current wave, or 0."""
    standby: RankGroup = _NO_GROUP
    """The group that is being prepared."""
    ready: bool = False
    """Whether the standby group is prepared."""
    unable: bool = False
    """Whether this rank cannot prepare the standby group."""
    told: int = 0
    """Value of ``prepared`` in the row that this rank sent in the last exchange."""

    @property
    def place(self) -> Place:
        """Position of the rank in the group's history: epoch, wave, step and pause number."""
        return Place(self.group.epoch, self.wave, self.step, self.pauses.number)

    @property
    def paused(self) -> bool:
        """Whether the current pause is complete: all ranks know about the pause, and no step will run before a resume."""
        stopped = self.phase is Phase.IDLE or (self.phase is Phase.EXCHANGE and self.step == 0 and not self.opening)
        return self.pauses.on and self.agreed == self.pauses and stopped

    @property
    def report(self) -> RankReport:
        """Full state, for a coordinator that may have no information about this rank."""
        running = self.phase in (Phase.EXCHANGE, Phase.FORWARD)
        prepared = self.standby.epoch if self.ready else 0
        return RankReport(self.engine, self.group, self.place, self.pauses, running, self.opening, prepared)

    # Events: requests.

    def add(self, epoch: int, wave: int, *, refused: bool = False) -> tuple[Self, Effects]:
        """Handle a new request with this epoch and wave. A request that the engine refuses starts a wave as well,
        because its frontend may have told the other ranks to join a wave.
        """
        after = self
        if not refused:
            after = self._with(held=True) if self.pauses.on else self._with(unfinished=True)
        if after.phase is not Phase.IDLE or after.pauses.on:
            return after, ()
        newer = wave if epoch == self.group.epoch else 0
        return after._with(wave=max(after.wave, newer))._start(report=True)

    def left_with(self, *, unfinished: bool, held: bool) -> tuple[Self, Effects]:
        """Record whether the rank still has unfinished and held requests, after requests have ended outside of a
        step.
        """
        return self._with(unfinished=unfinished, held=held), ()

    # Events: waves.

    def start_dp_wave(self, message: StartDpWave) -> tuple[Self, Effects]:
        """Handle the announcement that another rank is in this wave, or is about to enter it."""
        current = message.epoch == self.group.epoch and message.wave >= self.wave
        if not current or self.phase in (Phase.OUTSIDE, Phase.BROKEN):
            return self, ()
        after, effects = self._raise_pauses(message.pauses)
        if after.phase is Phase.IDLE:
            started, more = after._with(wave=message.wave)._start(report=after._has_news)
            return started, effects + more
        if message.wave > after.wave:
            after = after._with(start_at=max(after.start_at, message.wave))
        return after, effects

    def gathered(self, rows: Sequence[Row]) -> tuple[Self, Effects]:
        """Handle the end of an exchange. ``rows`` has the row of each member, in the order of ranks."""
        agreement = agree(rows)
        opened = self.opening
        told = rows[self.group.members.index(self.engine)].prepared
        after, effects = self._raise_pauses(agreement.pauses)
        after = after._with(agreed=agreement.pauses, wave=agreement.wave, told=told, opening=False)
        if agreement.switch_to:
            after, more = after._with(phase=Phase.IDLE)._open(after.standby)
        elif agreement.run:
            after, more = after._forward()
        else:
            after, more = after._stop(completed=not opened)
        return after, effects + more + ((after.report,) if opened and not agreement.switch_to else ())

    def stepped(self, *, unfinished: bool) -> tuple[Self, Effects]:
        """Handle the end of a forward pass. ``unfinished`` says whether the rank has requests that need more steps, not
        counting held requests.
        """
        after = self._with(step=self.step + 1, unfinished=unfinished)
        return after._exchange() if after.step % after.interval == 0 else after._forward()

    def repeat(self) -> tuple[Self, Effects]:
        """Repeat the messages that may have been lost. The driver calls this method again after ``REPEAT_INTERVAL``."""
        unable = (PrepareFailed(self.engine, self.standby.epoch),) if self.unable else ()
        if self.phase is Phase.BROKEN:
            return self, (self.report, PeerLost(self.engine, self.group.epoch), *unable)
        if self.phase is Phase.EXCHANGE and self.step == 0 and not self.opening:
            return self, (self._start_wave(), *unable)
        return self, (self.report, *unable)

    # Events: pauses.

    def pause(self, pauses: Pauses) -> tuple[Self, Effects]:
        """Handle a pause. A pause that is older than the newest pause or resume of this rank has no effect."""
        after, effects = self._raise_pauses(pauses)
        started, more = after._come()
        return started, effects + more

    def resume(self, pauses: Pauses) -> tuple[Self, Effects]:
        """Handle a resume. While the pause is not complete on this rank, the resume is refused."""
        if pauses > self.pauses and self.pauses.on and not self.paused:
            return self, (ResumeRefused(self.pauses),)
        after, effects = self._raise_pauses(pauses)
        started, more = after._come()
        return started, effects + more

    # Events: groups.

    def peer_lost(self) -> tuple[Self, Effects]:
        """Handle a failed collective. The rank waits until the coordinator announces the next group."""
        if self.phase not in (Phase.EXCHANGE, Phase.FORWARD):
            return self, ()
        forget: Effects = (RollBack(),) if self.phase is Phase.FORWARD else ()
        return self._with(phase=Phase.BROKEN), (*forget, PeerLost(self.engine, self.group.epoch))

    def reconfigure(self, message: Reconfigure) -> tuple[Self, Effects]:
        """Handle the announcement of a group. A group whose epoch is not newer than the current epoch has no effect. If
        the standby group, which is being prepared, is announced as immediate, other ranks have already switched to it.
        This rank then switches as well.
        """
        begun = message.group == self.standby and self.ready and not message.base
        if message.group.epoch <= max(self.group.epoch, self.standby.epoch) and not begun:
            return self, ()
        if message.base and self.phase is not Phase.OUTSIDE:
            serves = message.base == self.group.epoch
            return self._prepare(message.group) if serves else (self, ())
        raised, effects = self._with(wave=max(self.wave, message.wave))._raise_pauses(message.pauses)
        if message.base:
            preparing, more = raised._prepare(message.group)
            return preparing, effects + more
        opened, more = raised._open(message.group)
        return opened, effects + more

    def prepared(self, epoch: int) -> tuple[Self, Effects]:
        """Handle the end of the preparation of the standby group with this epoch. A rank without a group joins the
        standby group, and waits for the other ranks in the group's first exchange.
        """
        if epoch != self.standby.epoch or self.ready:
            return self, ()
        after = self._with(ready=True)
        return after._open(after.standby) if after.phase is Phase.OUTSIDE else after._come()

    def prepare_failed(self, epoch: int) -> tuple[Self, Effects]:
        """Handle an error in the preparation of the standby group with this epoch."""
        if epoch != self.standby.epoch or self.ready:
            return self, ()
        return self._with(unable=True), (PrepareFailed(self.engine, epoch),)

    # Helpers.

    @property
    def _has_news(self) -> bool:
        return self.pauses > self.agreed or (self.ready and self.standby.epoch != self.told)

    def _with(self, **changes: object) -> Self:
        return msgspec.structs.replace(self, **changes)

    def _come(self) -> tuple[Self, Effects]:
        """Start a wave if this rank is idle and has work or news."""
        works = self.unfinished and (not self.pauses.on or self.pauses.mode is PauseMode.WAIT)
        if self.phase is Phase.IDLE and (works or self._has_news):
            return self._start(report=True)
        return self, ()

    def _start(self, *, report: bool) -> tuple[Self, Effects]:
        told: Effects = (self._start_wave(),) if report or self._is_rank_0 else ()
        after, entered = self._exchange()
        return after, told + entered

    @property
    def _is_rank_0(self) -> bool:
        return self.group.members[0] == self.engine

    def _start_wave(self) -> StartWave:
        return StartWave(self.engine, self.group.epoch, self.wave, self.pauses)

    def _exchange(self) -> tuple[Self, Effects]:
        unfinished = self.unfinished and (not self.pauses.on or self.pauses.mode is PauseMode.WAIT)
        prepared = self.standby.epoch if self.ready else 0
        row = Row(self.group.epoch, self.wave, self.step, unfinished, self.pauses, prepared)
        return self._with(phase=Phase.EXCHANGE), (Exchange(self.group, row),)

    def _forward(self) -> tuple[Self, Effects]:
        step = Forward(self.group.epoch, self.wave, self.step, self.agreed, dummy=not self.unfinished)
        return self._with(phase=Phase.FORWARD), (step,)

    def _stop(self, *, completed: bool) -> tuple[Self, Effects]:
        """Become idle after an exchange. ``completed`` says whether a wave has ended. If a new epoch began and no rank
        has work, ``completed`` is False.
        """
        done: Effects = ()
        if completed and self._is_rank_0:
            done = (WaveComplete(self.engine, self.group.epoch, self.wave, self.pauses),)
        after = self._with(phase=Phase.IDLE, wave=self.wave + completed, step=0)
        if after.pauses.on and after.agreed == after.pauses:
            after = after._with(held=after.held or after.unfinished, unfinished=False)
        if after.start_at >= after.wave and after.start_at:
            after, more = after._with(wave=after.start_at, start_at=0)._start(report=after._has_news)
        else:
            after, more = after._with(start_at=0)._come()
        return after, done + more

    def _raise_pauses(self, pauses: Pauses) -> tuple[Self, Effects]:
        if pauses <= self.pauses:
            return self, ()
        if not pauses.on:
            work = self.unfinished or self.held
            return self._with(pauses=pauses, unfinished=work, held=False), (Release(),)
        keeps = pauses.mode is not PauseMode.ABORT
        return self._with(pauses=pauses, unfinished=self.unfinished and keeps), (Hold(pauses.mode),)

    def _prepare(self, group: RankGroup) -> tuple[Self, Effects]:
        return self._with(standby=group, ready=False, unable=False), (Prepare(group),)

    def _open(self, group: RankGroup) -> tuple[Self, Effects]:
        """Leave the current group and its collective, and enter the first exchange of the new group."""
        left: list[Effect] = []
        if self.phase is Phase.FORWARD:
            left.append(RollBack())
        if self.phase in (Phase.EXCHANGE, Phase.FORWARD):
            left.append(AbortCollective())
        after = self._with(group=group, step=0, start_at=0, told=0, opening=True)
        after = after._with(standby=_NO_GROUP, ready=False, unable=False)
        if self.engine not in group.members:
            outside = after._with(phase=Phase.OUTSIDE, opening=False, unfinished=False, held=False)
            return outside, (*left, Leave())
        joined, entered = after._exchange()
        return joined, (*left, Join(group), *entered)


# Encoding of rows for the all-gather. All encoded rows have the same length.

_ROW = struct.Struct("<QQQQQBB")


def pack_row(row: Row) -> bytes:
    """Return the encoded row."""
    pauses = row.pauses
    numbers = (row.epoch, row.wave, row.step, pauses.number, row.prepared)
    return _ROW.pack(*numbers, pauses.mode, row.unfinished)


def unpack_row(data: bytes) -> Row:
    """Return the row that was encoded. Raises struct.error for a wrong length, or ValueError if the pause mode is
    unknown.
    """
    epoch, wave, step, number, prepared, mode, unfinished = _ROW.unpack(data)
    return Row(epoch, wave, step, bool(unfinished), Pauses(number, PauseMode(mode)), prepared)
