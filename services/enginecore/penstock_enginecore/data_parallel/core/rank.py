"""One rank of a data-parallel group whose ranks compute every step together, as a state machine."""

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

# What one rank puts into an exchange.


class Row(msgspec.Struct, frozen=True, cache_hash=True):
    """A rank's row of the all-gather. It cannot be taken back: what the rank learns afterwards is in its next one."""

    epoch: int
    wave: int
    step: int
    unfinished: bool
    """Whether a step would advance a request."""
    pauses: Pauses
    """The newest pause or resume that the rank knows."""
    prepared: int = 0
    """The epoch that the rank can switch to; 0: none."""


# What a rank does beside telling its coordinator.


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


# What the ranks of a group agree on in an exchange.


class Agreement(msgspec.Struct, frozen=True):
    """What follows from the rows, for every rank alike."""

    wave: int
    pauses: Pauses
    run: bool
    """Whether all compute a step; otherwise the wave is over."""
    switch_to: int
    """The epoch that all switch to now; 0: none."""


def agree(rows: Sequence[Row]) -> Agreement:
    """A pure function of the gathered rows.

    The newest pause or resume that any rank knows is that of all. A pause that waits lets a wave go on until nobody has work.
    An epoch begins when every rank is prepared for it.
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
    """What a rank is in."""

    OUTSIDE = "no group"
    IDLE = "no wave"
    EXCHANGE = "an exchange"
    FORWARD = "a forward pass"
    BROKEN = "a group of which a collective broke off"


class Rank(msgspec.Struct, frozen=True, cache_hash=True):
    """A rank's state. Every method is an event, and returns the next state and what is to be done, in order.

    All ranks of a group run or all are idle, because a step needs every one of them. A wave opens and goes on with exchanges,
    small all-gathers on the CPU: one before its first step and every ``interval``-th after that. Whether a collective is entered
    depends on the last exchange's rows alone, which all ranks have seen alike. The wave ends when no row has work.

    A rank that is idle enters the first exchange of its wave when it has work, has news, or was told to. News is a pause, a
    resume or a standby group that was in no exchange yet. So one rank that knows of it is enough: nobody has to reach all, or to
    stay alive. Whoever waits in a first exchange says so again and again (``repeat``); who hears it and is idle comes. A paused
    rank comes too: no step follows. A rank that waits in an exchange takes every other event meanwhile.

    A group's change comes in one of two ways. A planned one is prepared beside the serving group, and all switch after the
    exchange in which all were prepared. Any other is at once: the collective is given up, its step forgotten. Both open with an
    exchange, after which wave and pauses are the highest of all.
    """

    engine: str
    interval: int = 1
    """Steps from one exchange to the next."""
    group: RankGroup = _NO_GROUP
    phase: Phase = Phase.OUTSIDE
    wave: int = 0
    step: int = 0
    pauses: Pauses = Pauses()
    """The newest pause or resume that it knows."""
    agreed: Pauses = Pauses()
    """That of all, after the last exchange."""
    opening: bool = False
    """Whether the exchange is the epoch's first."""
    unfinished: bool = False
    """Whether it has requests that steps advance."""
    held: bool = False
    """Whether it has requests that wait for a resume."""
    start_at: int = 0
    """A later wave that it was told of while in this one; 0: none."""
    standby: RankGroup = _NO_GROUP
    """The group that it prepares."""
    ready: bool = False
    """Whether the standby group is prepared."""
    unable: bool = False
    """Whether it cannot be prepared here."""
    told: int = 0
    """The prepared epoch of its row in the last exchange."""

    @property
    def place(self) -> Place:
        """Where it is."""
        return Place(self.group.epoch, self.wave, self.step, self.pauses.number)

    @property
    def paused(self) -> bool:
        """Whether the pause that is on is complete: all know of it, and no step follows before a resume."""
        stopped = self.phase is Phase.IDLE or (self.phase is Phase.EXCHANGE and self.step == 0 and not self.opening)
        return self.pauses.on and self.agreed == self.pauses and stopped

    @property
    def report(self) -> RankReport:
        """For a coordinator that may know nothing."""
        running = self.phase in (Phase.EXCHANGE, Phase.FORWARD)
        prepared = self.standby.epoch if self.ready else 0
        return RankReport(self.engine, self.group, self.place, self.pauses, running, self.opening, prepared)

    # Requests.

    def add(self, epoch: int, wave: int, *, refused: bool = False) -> tuple[Self, Effects]:
        """A request came that was stamped with this wave of this epoch.

        A refused one starts a wave as well: its frontend may have told the other ranks to.
        """
        after = self
        if not refused:
            after = self._with(held=True) if self.pauses.on else self._with(unfinished=True)
        if after.phase is not Phase.IDLE or after.pauses.on:
            return after, ()
        newer = wave if epoch == self.group.epoch else 0
        return after._with(wave=max(after.wave, newer))._start(report=True)

    def left_with(self, *, unfinished: bool, held: bool) -> tuple[Self, Effects]:
        """Requests ended outside of a step; this is what is left."""
        return self._with(unfinished=unfinished, held=held), ()

    # Waves.

    def start_dp_wave(self, message: StartDpWave) -> tuple[Self, Effects]:
        """Somebody is in a wave, or about to be."""
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
        """The exchange is over; ``rows`` are those of all members, in order."""
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
        """The forward pass is over; ``unfinished``: whether requests that are not held have more to compute."""
        after = self._with(step=self.step + 1, unfinished=unfinished)
        return after._exchange() if after.step % after.interval == 0 else after._forward()

    def repeat(self) -> tuple[Self, Effects]:
        """Some time went by: say again what may have been lost."""
        unable = (PrepareFailed(self.engine, self.standby.epoch),) if self.unable else ()
        if self.phase is Phase.BROKEN:
            return self, (self.report, PeerLost(self.engine, self.group.epoch), *unable)
        if self.phase is Phase.EXCHANGE and self.step == 0 and not self.opening:
            return self, (self._start_wave(), *unable)
        return self, (self.report, *unable)

    # Pauses.

    def pause(self, pauses: Pauses) -> tuple[Self, Effects]:
        """A caller wants this pause. One that is older than what the rank knows changes nothing."""
        after, effects = self._raise_pauses(pauses)
        started, more = after._come()
        return started, effects + more

    def resume(self, pauses: Pauses) -> tuple[Self, Effects]:
        """A caller wants this resume. It is refused while the pause is not complete here."""
        if pauses > self.pauses and self.pauses.on and not self.paused:
            return self, (ResumeRefused(self.pauses),)
        after, effects = self._raise_pauses(pauses)
        started, more = after._come()
        return started, effects + more

    # Groups.

    def peer_lost(self) -> tuple[Self, Effects]:
        """The collective broke off. The rank waits to be told who is left."""
        if self.phase not in (Phase.EXCHANGE, Phase.FORWARD):
            return self, ()
        forget: Effects = (RollBack(),) if self.phase is Phase.FORWARD else ()
        return self._with(phase=Phase.BROKEN), (*forget, PeerLost(self.engine, self.group.epoch))

    def reconfigure(self, message: Reconfigure) -> tuple[Self, Effects]:
        """The coordinator names a group. An epoch that is not newer changes nothing.

        One that is prepared and is named to be at once has begun: others have switched.
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
        """The standby group of this epoch is built. A rank that has no other joins it and waits for the rest there."""
        if epoch != self.standby.epoch or self.ready:
            return self, ()
        after = self._with(ready=True)
        return after._open(after.standby) if after.phase is Phase.OUTSIDE else after._come()

    def prepare_failed(self, epoch: int) -> tuple[Self, Effects]:
        """The standby group of this epoch cannot be built here."""
        if epoch != self.standby.epoch or self.ready:
            return self, ()
        return self._with(unable=True), (PrepareFailed(self.engine, epoch),)

    # What events have in common.

    @property
    def _has_news(self) -> bool:
        return self.pauses > self.agreed or (self.ready and self.standby.epoch != self.told)

    def _with(self, **changes: object) -> Self:
        return msgspec.structs.replace(self, **changes)

    def _come(self) -> tuple[Self, Effects]:
        """Start a wave if there is a reason of its own for it."""
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
        """Idle after an exchange; ``completed``: a wave is over, which is not so where an epoch opens without work."""
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
        """Leave the group and whatever collective there is, and enter the first exchange of this one."""
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


# Rows as the bytes of an all-gather: of one length, whatever they say.

_ROW = struct.Struct("<QQQQQBB")


def pack_row(row: Row) -> bytes:
    """The row's bytes."""
    pauses = row.pauses
    numbers = (row.epoch, row.wave, row.step, pauses.number, row.prepared)
    return _ROW.pack(*numbers, pauses.mode, row.unfinished)


def unpack_row(data: bytes) -> Row:
    """The row of these bytes. Raises struct.error, and ValueError for a mode that there is not."""
    epoch, wave, step, number, prepared, mode, unfinished = _ROW.unpack(data)
    return Row(epoch, wave, step, bool(unfinished), Pauses(number, PauseMode(mode)), prepared)
