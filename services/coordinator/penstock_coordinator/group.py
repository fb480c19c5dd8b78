"""Data-parallel group as a state machine: its members epoch by epoch, and its waves."""

import re
from typing import Self

import msgspec

from penstock_common.types.data_parallel import (
    FirstRequest,
    GroupView,
    Pauses,
    PeerLost,
    PrepareFailed,
    RankGroup,
    RankReport,
    Reconfigure,
    StartDpWave,
    StartWave,
    WaveComplete,
)

# In which wave a data-parallel group is, as a state machine.


class Waves(msgspec.Struct, frozen=True, cache_hash=True):
    """What the coordinator has seen of a group's waves. Every method is a message, and returns the next state and what is sent.

    It never predicts: the group runs once a rank says that it is in the wave, and not because somebody was told to. Whatever
    names another epoch is dropped, and an older wave changes nothing. Whoever reported a start is in it; everybody else is told,
    also the rank that a first request went to: it may have refused it.
    """

    group: RankGroup = RankGroup()
    wave: int = 0
    running: bool = False
    pauses: Pauses = Pauses()
    """The newest that any rank has told."""

    @property
    def view(self) -> GroupView:
        """For the frontends."""
        return GroupView(self.group, self.wave, self.running, self.pauses)

    def regroup(self, group: RankGroup) -> Self:
        """Another epoch begins, whose ranks have yet to say whether they run."""
        return msgspec.structs.replace(self, group=group, running=False)

    def first_request(self, message: FirstRequest) -> tuple[Self, tuple[StartDpWave, ...]]:
        """A request went to a rank of a group that its frontend believes idle."""
        if message.epoch != self.group.epoch or message.wave < self.wave or self.running:
            return self, ()
        after = msgspec.structs.replace(self, wave=message.wave)
        return after, after._start(excluded="")

    def start_wave(self, message: StartWave) -> tuple[Self, tuple[StartDpWave, ...]]:
        """A rank is in the first exchange of a wave."""
        if message.epoch != self.group.epoch or message.wave < self.wave:
            return self, ()
        after = self._seen(message.wave, message.pauses, running=True)
        return after, after._start(excluded=message.engine)

    def wave_complete(self, message: WaveComplete) -> tuple[Self, tuple[StartDpWave, ...]]:
        """A wave is over."""
        if message.epoch != self.group.epoch or message.wave < self.wave:
            return self, ()
        return self._seen(message.wave + 1, message.pauses, running=False), ()

    def report(self, message: RankReport) -> tuple[Self, tuple[StartDpWave, ...]]:
        """Where a rank is. An idle one shows that the wave before its own is over; who is outside may know of none, or of more
        than there were.
        """
        wave, outside = message.place.wave, message.engine not in self.group.members
        if message.place.epoch != self.group.epoch or outside or message.opening or wave < self.wave:
            return self, ()
        running = message.running or (self.running and wave == self.wave)
        return self._seen(wave, message.pauses, running=running), ()

    def _seen(self, wave: int, pauses: Pauses, *, running: bool) -> Self:
        newest = max(self.pauses, pauses)
        return msgspec.structs.replace(self, wave=wave, running=running, pauses=newest)

    def _start(self, *, excluded: str) -> tuple[StartDpWave, ...]:
        group = self.group
        return tuple(
            StartDpWave(engine, group.epoch, self.wave, self.pauses) for engine in group.members if engine != excluded
        )


_NOBODY: frozenset[str] = frozenset()
_NO_GROUP = RankGroup()


class ScaleRefused(msgspec.Struct, frozen=True):
    """The group does not change its size now."""

    reason: str


Sent = tuple[StartDpWave | Reconfigure, ...]


class GroupMachine(msgspec.Struct, frozen=True, cache_hash=True):
    """A group as its coordinator knows it. Every method is an event, and returns the next state and what is sent.

    A group changes when its size is changed, which all its ranks prepare and then do together, or when a rank is dead: then
    whoever is left is told at once. A rank is dead when its stream broke off and a collective did too, or not all are in the
    newest group yet; when its lease is over; or when it said goodbye. A collective that breaks off while all streams hold was the
    network's fault, and all stay. Where a planned change fails, the group that served is named again, with an epoch of its own:
    nobody here knows who has switched.

    An epoch is given out once. ``floor`` is a number that no earlier coordinator can have come to, such as the time of its start.
    A coordinator that has started takes the newest group that ranks tell it of, and decides nothing before ``recovered``, which
    comes one lease later: by then whoever is alive has told where it is.
    """

    size: int
    """Ranks of the first group."""
    min_size: int = 1
    """With fewer, the group waits for others."""
    waits: bool = False
    """Whether a group that has lost a rank waits for another one, and does not go on without."""
    floor: int = 0
    recovering: bool = True
    waves: Waves = Waves()
    """Those of the newest group."""
    standby: RankGroup = _NO_GROUP
    """The group that is prepared."""
    highest: int = 0
    """The newest epoch that was given out or seen."""
    known: frozenset[str] = _NOBODY
    """Whose lease is valid."""
    broken: frozenset[str] = _NOBODY
    """Whose stream broke off."""
    reporters: frozenset[str] = _NOBODY
    """Who said that a collective of the newest epoch broke off."""
    late: frozenset[str] = _NOBODY
    """Of these, who said it of an older epoch, in which they may not have heard yet of the newest."""
    opened: frozenset[str] = _NOBODY
    """Who said that the newest epoch's first exchange is over."""
    unsettled: bool = False
    """Whether a rank is prepared for an epoch that an earlier coordinator gave out."""

    @property
    def group(self) -> RankGroup:
        """The newest group."""
        return self.waves.group

    @property
    def finished(self) -> bool:
        """Whether all ranks have switched to the newest epoch."""
        return self.group.epoch > 0 and self.opened >= set(self.group.members)

    @property
    def suspended(self) -> bool:
        """Whether ranks are lost without which the group does not go on."""
        return self.group.epoch > 0 and bool(self._dead())

    @property
    def spares(self) -> tuple[str, ...]:
        """Ranks that are in no group and could be."""
        return tuple(sorted(self.known - self.broken - set(self.group.members), key=_in_order))

    @property
    def view(self) -> GroupView:
        """For the frontends. Ranks that are about to leave get no requests any more."""
        members = self.group.members
        routed = tuple(m for m in members if m in self.standby.members) if self.standby.epoch else members
        return msgspec.structs.replace(self.waves.view, routed=routed)

    # Waves.

    def first_request(self, message: FirstRequest) -> tuple[Self, Sent]:
        """A request went to a rank of a group believed idle."""
        return self._of_waves(self.waves.first_request(message))

    def start_wave(self, message: StartWave) -> tuple[Self, Sent]:
        """A rank is in the first exchange of a wave."""
        after, sent = self._of_waves(self.waves.start_wave(message))
        return after, sent + self._catch_up(message.engine, message.epoch)

    def wave_complete(self, message: WaveComplete) -> tuple[Self, Sent]:
        """A wave is over."""
        return self._of_waves(self.waves.wave_complete(message))

    # Members.

    def founded(self, size: int, *, min_size: int, waits: bool) -> tuple[Self, Sent]:
        """The first rank says how large the group is to be."""
        return self._with(size=size, min_size=min_size, waits=waits), ()

    def report(self, message: RankReport) -> tuple[Self, Sent]:
        """A rank says where it is: it registers, keeps its lease, or has been through an epoch's first exchange."""
        epoch, engine = message.group.epoch, message.engine
        inside = engine in message.group.members
        after = self._with(
            known=self.known | {engine},
            broken=self.broken - {engine},
            highest=max(self.highest, epoch, message.prepared),
            unsettled=self.unsettled or (self.recovering and (message.prepared > 0 or message.opening)),
        )
        if inside and self._goes_by(message):
            after = after._with(standby=_NO_GROUP, reporters=_NOBODY, late=_NOBODY, opened=_NOBODY)
            after = after._with(waves=after.waves.regroup(message.group))
        if inside and message.group == after.group and not message.opening:
            after = after._with(opened=after.opened | {engine}, late=after.late - {engine})
            if engine in self.late:  # it is where the others are: what broke off is over
                after = after._with(reporters=after.reporters - {engine})
        after = after._with(waves=after.waves.report(message)[0])
        stray = inside and epoch > max(after.group.epoch, after.standby.epoch)
        decided, sent = after._decide(anew=stray)
        late = decided._catch_up(engine, epoch) if inside and (stray or decided.group == after.group) else ()
        return decided, sent + late

    def _goes_by(self, message: RankReport) -> bool:
        """Whether the group that a rank says it is in is newer than the one known.

        A newcomer waits in the first exchange of an epoch before anybody has switched to it. Where it is counts for nothing,
        unless an earlier coordinator has left no better report.
        """
        if self.recovering and not self.opened:
            return not message.opening or message.group.epoch > self.group.epoch
        switched = not message.opening or (message.group == self.standby and message.engine in self.group.members)
        return message.group.epoch > self.group.epoch and switched

    def stream_broken(self, engine: str) -> tuple[Self, Sent]:
        """A rank's stream broke off. It may be back before its lease is over."""
        return self._with(broken=self.broken | {engine})._decide()

    def gone(self, engine: str) -> tuple[Self, Sent]:
        """A rank's lease is over, or it has shut down."""
        return self._with(known=self.known - {engine}, broken=self.broken - {engine})._decide()

    def peer_lost(self, message: PeerLost) -> tuple[Self, Sent]:
        """A collective broke off. Said again while all streams hold, it is the network's fault."""
        engine, epoch = message.engine, message.epoch
        stale = epoch < self.group.epoch and (engine in self.opened or engine not in self.group.members)
        if stale or engine not in {*self.group.members, *self.standby.members}:
            return self, self._catch_up(engine, epoch)
        late = self.late | {engine} if epoch < self.group.epoch else self.late - {engine}
        after, sent = self._with(reporters=self.reporters | {engine}, late=late)._decide()
        if sent or self.recovering or engine not in self.reporters:
            return after, sent
        return after._decide(anew=True)

    # Changes.

    def scale(self, size: int) -> tuple[Self, tuple[StartDpWave | Reconfigure | ScaleRefused, ...]]:
        """An operator wants this many ranks. They leave and come in order of their names, as pods of a StatefulSet do: the last
        ones leave, also where one of the first was lost and is back at the end of the group.
        """
        if self.recovering or self.standby.epoch or self.reporters or not self.finished or self._dead():
            return self, (ScaleRefused("the group is changing"),)
        staying = sorted(self.group.members, key=_in_order)[:size]
        members = tuple(m for m in self.group.members if m in staying) + self.spares[: size - len(staying)]
        if len(members) != size or size < self.min_size:
            return self, (ScaleRefused(f"size is {size}; it must be from {self.min_size} to {len(members)}"),)
        if members == self.group.members:
            return self, ()
        epoch = self._next_epoch()
        after = self._with(standby=RankGroup(epoch, members), highest=epoch)
        return after, after._outstanding()

    def prepare_failed(self, message: PrepareFailed) -> tuple[Self, Sent]:
        """A rank cannot be in the group that is prepared. Where the others have switched already, or are in none, they go on
        without it, with a spare in its place if they are too few. Where there is none nobody is named: what broke off is said
        again, and all are.
        """
        if message.epoch == self.standby.epoch:
            return self._decide(anew=True)
        if message.epoch != self.group.epoch or message.engine in self.opened or self.recovering:
            return self, ()
        able = tuple(m for m in self._living() if m != message.engine)
        members = able + self.spares[: max(self.min_size - len(able), 0)]
        return self._name(members) if len(members) >= self.min_size else (self, ())

    def recovered(self) -> tuple[Self, Sent]:
        """One lease went by since the coordinator started."""
        return self._with(recovering=False, unsettled=False)._decide(anew=self.unsettled)

    def repeat(self) -> tuple[Self, Sent]:
        """Some time went by: say again what may have been lost."""
        return self, () if self.recovering else self._outstanding()

    # What events have in common.

    def _with(self, **changes: object) -> Self:
        return msgspec.structs.replace(self, **changes)

    def _of_waves(self, step: tuple[Waves, tuple[StartDpWave, ...]]) -> tuple[Self, Sent]:
        waves, sent = step
        return (self if waves == self.waves else self._with(waves=waves)), sent

    def _next_epoch(self) -> int:
        return max(self.highest, self.floor) + 1

    def _dead(self) -> set[str]:
        """Members of either group that are not coming back."""
        members = {*self.group.members, *self.standby.members}
        lost = self.broken if self.reporters or not self.finished else _NOBODY
        return {m for m in members if m not in self.known or m in lost}

    @property
    def _fewest(self) -> int:
        """Members of the next group, at least."""
        if not self.group.epoch:
            return self.size
        return len(self.group.members) if self.waits else self.min_size

    def _living(self) -> tuple[str, ...]:
        """Members that a group has which is named now: whose stream has broken off would be dead in it until it has opened."""
        return tuple(m for m in self.group.members if m in self.known and m not in self.broken)

    def _decide(self, *, anew: bool = False) -> tuple[Self, Sent]:
        """Name a group if the one there is cannot go on, or if it has to be named ``anew``."""
        if self.recovering or (self.group.epoch and not self._dead() and not anew):
            return self, ()
        living = self._living()
        wanted = self._fewest
        members = living + self.spares[: max(wanted - len(living), 0)]
        return self._name(members) if len(members) >= wanted else (self, ())

    def _name(self, members: tuple[str, ...]) -> tuple[Self, Sent]:
        """The next epoch is these ranks', at once; whoever is left out is told as well."""
        former = {*self.group.members, *self.standby.members} - set(members)
        group = RankGroup(self._next_epoch(), members)
        after = self._with(
            waves=self.waves.regroup(group),
            standby=_NO_GROUP,
            highest=group.epoch,
            reporters=_NOBODY,
            late=_NOBODY,
            opened=_NOBODY,
        )
        expelled = tuple(after._reconfigure(m, group) for m in sorted(former & self.known))
        return after, after._outstanding() + expelled

    def _outstanding(self) -> Sent:
        """What ranks were told and have not done."""
        if self.standby.epoch:
            everybody = dict.fromkeys(self.group.members + self.standby.members)
            return tuple(self._reconfigure(m, self.standby, base=self.group.epoch) for m in everybody)
        return tuple(self._reconfigure(m, self.group) for m in self.group.members if m not in self.opened)

    def _catch_up(self, engine: str, epoch: int) -> Sent:
        """For a rank that is in an older epoch."""
        behind = epoch < self.group.epoch and not self.recovering
        return (self._reconfigure(engine, self.group),) if behind else ()

    def _reconfigure(self, engine: str, group: RankGroup, *, base: int = 0) -> Reconfigure:
        return Reconfigure(engine, group, self.waves.wave, self.waves.pauses, base)


def _in_order(name: str) -> list[tuple[int, str]]:
    """By which names with numbers are sorted as people count: "engine-10" behind "engine-9"."""
    return [(int(number or 0), text) for number, text in re.findall(r"(\d+)|(\D+)", name)]
