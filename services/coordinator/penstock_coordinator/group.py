"""State machines of a data-parallel group, for its waves and for its members in each epoch."""

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

# The class below is the state machine of the waves.


class Waves(msgspec.Struct, frozen=True, cache_hash=True):
    """Waves of a group as the coordinator has observed them.

    Every method that handles a message returns the next state and the messages to send.

    The machine uses only reports of ranks, and makes no assumptions. The group counts as running once a rank reports
    that the rank is in the wave. Messages of another epoch or an older wave are ignored. If a rank reports that it has
    started a wave, the coordinator sends a start message to all other ranks. This includes the rank of the first
    request, because that rank may have refused the request.
    """

    group: RankGroup = RankGroup()
    wave: int = 0
    running: bool = False
    pauses: Pauses = Pauses()
    """Newest pause state that any rank has reported."""

    @property
    def view(self) -> GroupView:
        """View of the group for frontends."""
        return GroupView(self.group, self.wave, self.running, self.pauses)

    def regroup(self, group: RankGroup) -> Self:
        """Begin a new epoch. The new group counts as idle until its ranks report that they run steps of a wave."""
        return msgspec.structs.replace(self, group=group, running=False)

    def first_request(self, message: FirstRequest) -> tuple[Self, tuple[StartDpWave, ...]]:
        """Handle a request that a frontend sent to a rank, while the frontend considered the rank's group idle."""
        if message.epoch != self.group.epoch or message.wave < self.wave or self.running:
            return self, ()
        after = msgspec.structs.replace(self, wave=message.wave)
        return after, after._start(excluded="")

    def start_wave(self, message: StartWave) -> tuple[Self, tuple[StartDpWave, ...]]:
        """Handle a rank that has started a wave, and waits for the other ranks in the first exchange of the wave."""
        if message.epoch != self.group.epoch or message.wave < self.wave:
            return self, ()
        after = self._seen(message.wave, message.pauses, running=True)
        return after, after._start(excluded=message.engine)

    def wave_complete(self, message: WaveComplete) -> tuple[Self, tuple[StartDpWave, ...]]:
        """Handle the end of a wave."""
        if message.epoch != self.group.epoch or message.wave < self.wave:
            return self, ()
        return self._seen(message.wave + 1, message.pauses, running=False), ()

    def report(self, message: RankReport) -> tuple[Self, tuple[StartDpWave, ...]]:
        """Handle a rank's report of its current wave. If a rank is idle in a wave, all earlier waves have ended.

        Ignore a rank outside the group, because its wave number may be too low or too high.
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
    """Refusal to change the size of the group now."""

    reason: str


Sent = tuple[StartDpWave | Reconfigure, ...]


class GroupMachine(msgspec.Struct, frozen=True, cache_hash=True):
    """State machine of a group's membership.

    Every method that handles an event returns the next state and the messages to send.

    A group changes in two cases. If an operator changes the group's size, all ranks prepare the change, and then switch
    together. If a rank is dead, the coordinator immediately sends a new group to the remaining ranks.

    A rank is dead if its lease has expired, or if it has shut down. A rank whose stream broke also counts as dead in
    two cases: a collective operation has failed too, or not all ranks have joined the newest group yet.

    If a collective operation fails while all streams are intact, the network failed, and all ranks stay. If a planned
    change fails, the coordinator does not know which ranks have switched. The coordinator therefore sends the previous
    members a group with the same members and a new epoch.

    An epoch number is used only once. ``floor`` is a number that is higher than the epochs of all earlier coordinators,
    such as the coordinator's start time. After a restart, the coordinator uses the newest group that ranks report. The
    coordinator decides nothing before ``recovered`` is called one lease later. By then, every living rank has reported.
    """

    size: int
    """Number of ranks in the first group."""
    min_size: int = 1
    """Minimum number of ranks. If a group has fewer ranks, the group waits for more ranks."""
    waits: bool = False
    """Whether a group that has lost a rank waits for a replacement instead of continuing without it."""
    floor: int = 0
    recovering: bool = True
    waves: Waves = Waves()
    """Waves of the newest group."""
    standby: RankGroup = _NO_GROUP
    """Group that the ranks are preparing."""
    highest: int = 0
    """Highest epoch that the coordinator has assigned, or that a rank has reported."""
    known: frozenset[str] = _NOBODY
    """Ranks with a valid lease."""
    broken: frozenset[str] = _NOBODY
    """Ranks whose stream broke."""
    reporters: frozenset[str] = _NOBODY
    """Ranks that reported a failed collective operation in the newest epoch."""
    late: frozenset[str] = _NOBODY
    """Ranks among ``reporters`` that reported an older epoch. These ranks may not have received the newest epoch yet.
    """
    opened: frozenset[str] = _NOBODY
    """Ranks that reported that they have completed the first exchange of the newest epoch."""
    unsettled: bool = False
    """Whether a rank has prepared an epoch that an earlier coordinator assigned."""

    @property
    def group(self) -> RankGroup:
        """Newest group."""
        return self.waves.group

    @property
    def finished(self) -> bool:
        """Whether all ranks have switched to the newest epoch."""
        return self.group.epoch > 0 and self.opened >= set(self.group.members)

    @property
    def suspended(self) -> bool:
        """Whether the group cannot continue because it has lost ranks."""
        return self.group.epoch > 0 and bool(self._dead())

    @property
    def spares(self) -> tuple[str, ...]:
        """Ranks that are in no group, and could join the group."""
        return tuple(sorted(self.known - self.broken - set(self.group.members), key=_in_order))

    @property
    def view(self) -> GroupView:
        """View of the group for frontends. Ranks that are about to leave get no new requests."""
        members = self.group.members
        routed = tuple(m for m in members if m in self.standby.members) if self.standby.epoch else members
        return msgspec.structs.replace(self.waves.view, routed=routed)

    # The methods below handle events of waves.

    def first_request(self, message: FirstRequest) -> tuple[Self, Sent]:
        """Handle a request that a frontend sent to a rank, while the frontend considered the group idle."""
        return self._of_waves(self.waves.first_request(message))

    def start_wave(self, message: StartWave) -> tuple[Self, Sent]:
        """Handle a rank in the first exchange of a wave."""
        after, sent = self._of_waves(self.waves.start_wave(message))
        return after, sent + self._catch_up(message.engine, message.epoch)

    def wave_complete(self, message: WaveComplete) -> tuple[Self, Sent]:
        """Handle the end of a wave."""
        return self._of_waves(self.waves.wave_complete(message))

    # The methods below handle events of members.

    def founded(self, size: int, *, min_size: int, waits: bool) -> tuple[Self, Sent]:
        """Set the group's size. The first rank of the group reports the size."""
        return self._with(size=size, min_size=min_size, waits=waits), ()

    def report(self, message: RankReport) -> tuple[Self, Sent]:
        """Handle a rank's report of its group and wave.

        A rank sends this report when it registers, renews its lease, or completes the first exchange of an epoch.
        """
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
            if engine in self.late:  # the rank has reached the newest epoch, so its failure is resolved
                after = after._with(reporters=after.reporters - {engine})
        after = after._with(waves=after.waves.report(message)[0])
        stray = inside and epoch > max(after.group.epoch, after.standby.epoch)
        decided, sent = after._decide(anew=stray)
        late = decided._catch_up(engine, epoch) if inside and (stray or decided.group == after.group) else ()
        return decided, sent + late

    def _goes_by(self, message: RankReport) -> bool:
        """Return whether to use the group in a rank's report, because that group is newer than the group that the
        coordinator knows.

        A new rank waits in the first exchange of an epoch before any rank has switched to the epoch. The group in its
        report is therefore not used. After a restart of the coordinator, this group is used if there is no better
        report.
        """
        if self.recovering and not self.opened:
            return not message.opening or message.group.epoch > self.group.epoch
        switched = not message.opening or (message.group == self.standby and message.engine in self.group.members)
        return message.group.epoch > self.group.epoch and switched

    def stream_broken(self, engine: str) -> tuple[Self, Sent]:
        """Handle the end of a rank's stream. The rank may reconnect before its lease expires."""
        return self._with(broken=self.broken | {engine})._decide()

    def gone(self, engine: str) -> tuple[Self, Sent]:
        """Handle a rank whose lease has expired, or that has shut down."""
        return self._with(known=self.known - {engine}, broken=self.broken - {engine})._decide()

    def peer_lost(self, message: PeerLost) -> tuple[Self, Sent]:
        """Handle a failed collective operation.

        If a rank reports the failure again while all streams are intact, the network failed.
        """
        engine, epoch = message.engine, message.epoch
        stale = epoch < self.group.epoch and (engine in self.opened or engine not in self.group.members)
        if stale or engine not in {*self.group.members, *self.standby.members}:
            return self, self._catch_up(engine, epoch)
        late = self.late | {engine} if epoch < self.group.epoch else self.late - {engine}
        after, sent = self._with(reporters=self.reporters | {engine}, late=late)._decide()
        if sent or self.recovering or engine not in self.reporters:
            return after, sent
        return after._decide(anew=True)

    # The methods below change the group.

    def scale(self, size: int) -> tuple[Self, tuple[StartDpWave | Reconfigure | ScaleRefused, ...]]:
        """Change the number of ranks.

        Ranks join and leave in the order of their names, like pods of a StatefulSet. The ranks with the last names
        leave first. This is also true if a rank with an earlier name was lost, and has rejoined at the end of the
        group.
        """
        if self.recovering or self.standby.epoch or self.reporters or not self.finished or self._dead():
            return self, (
                ScaleRefused("the data-parallel group is still changing its number of ranks after an earlier request"),
            )
        staying = sorted(self.group.members, key=_in_order)[:size]
        members = tuple(m for m in self.group.members if m in staying) + self.spares[: size - len(staying)]
        if len(members) != size or size < self.min_size:
            available = len(self.group.members) + len(self.spares)
            return self, (
                ScaleRefused(
                    f"the new number of ranks is {size}; this number must be from {self.min_size} to {available}"
                ),
            )
        if members == self.group.members:
            return self, ()
        epoch = self._next_epoch()
        after = self._with(standby=RankGroup(epoch, members), highest=epoch)
        return after, after._outstanding()

    def prepare_failed(self, message: PrepareFailed) -> tuple[Self, Sent]:
        """Handle a rank that cannot join the group that the ranks prepare.

        If the other ranks have already switched, or belong to no group, the other ranks continue without this rank. If
        the other ranks are too few, a spare rank replaces this rank. If there is no spare rank, the coordinator assigns
        no group now. The ranks then report the failed collective operation again, and the coordinator assigns a group
        with all ranks.
        """
        if message.epoch == self.standby.epoch:
            return self._decide(anew=True)
        if message.epoch != self.group.epoch or message.engine in self.opened or self.recovering:
            return self, ()
        able = tuple(m for m in self._living() if m != message.engine)
        members = able + self.spares[: max(self.min_size - len(able), 0)]
        return self._name(members) if len(members) >= self.min_size else (self, ())

    def recovered(self) -> tuple[Self, Sent]:
        """Handle the end of the recovery time, one lease after the start of the coordinator."""
        return self._with(recovering=False, unsettled=False)._decide(anew=self.unsettled)

    def repeat(self) -> tuple[Self, Sent]:
        """Return the messages to send again, because they may have been lost. Called periodically."""
        return self, () if self.recovering else self._outstanding()

    # The event methods use the methods below.

    def _with(self, **changes: object) -> Self:
        return msgspec.structs.replace(self, **changes)

    def _of_waves(self, step: tuple[Waves, tuple[StartDpWave, ...]]) -> tuple[Self, Sent]:
        waves, sent = step
        return (self if waves == self.waves else self._with(waves=waves)), sent

    def _next_epoch(self) -> int:
        return max(self.highest, self.floor) + 1

    def _dead(self) -> set[str]:
        """Return the dead members of the current group and of the group that the ranks prepare."""
        members = {*self.group.members, *self.standby.members}
        lost = self.broken if self.reporters or not self.finished else _NOBODY
        return {m for m in members if m not in self.known or m in lost}

    @property
    def _fewest(self) -> int:
        """Minimum number of members of the next group."""
        if not self.group.epoch:
            return self.size
        return len(self.group.members) if self.waits else self.min_size

    def _living(self) -> tuple[str, ...]:
        """Return the members that a new group can keep.

        Ranks with a broken stream are left out, because they would count as dead until they report.
        """
        return tuple(m for m in self.group.members if m in self.known and m not in self.broken)

    def _decide(self, *, anew: bool = False) -> tuple[Self, Sent]:
        """Assign a new group if the current group cannot continue, or if ``anew`` is True."""
        if self.recovering or (self.group.epoch and not self._dead() and not anew):
            return self, ()
        living = self._living()
        wanted = self._fewest
        members = living + self.spares[: max(wanted - len(living), 0)]
        return self._name(members) if len(members) >= wanted else (self, ())

    def _name(self, members: tuple[str, ...]) -> tuple[Self, Sent]:
        """Assign a group with these members and the next epoch, which is valid immediately.

        Former members that are not in the new group also get the message.
        """
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
        """Return the messages on which ranks have not acted yet."""
        if self.standby.epoch:
            everybody = dict.fromkeys(self.group.members + self.standby.members)
            return tuple(self._reconfigure(m, self.standby, base=self.group.epoch) for m in everybody)
        return tuple(self._reconfigure(m, self.group) for m in self.group.members if m not in self.opened)

    def _catch_up(self, engine: str, epoch: int) -> Sent:
        """Return the message with the newest group for a rank that is in an older epoch."""
        behind = epoch < self.group.epoch and not self.recovering
        return (self._reconfigure(engine, self.group),) if behind else ()

    def _reconfigure(self, engine: str, group: RankGroup, *, base: int = 0) -> Reconfigure:
        return Reconfigure(engine, group, self.waves.wave, self.waves.pauses, base)


def _in_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key for names with numbers. With this key, "engine-9" comes before "engine-10"."""
    return [(int(number or 0), text) for number, text in re.findall(r"(\d+)|(\D+)", name)]
