"""In which wave a data-parallel group is, as a state machine."""

from typing import Self

import msgspec

from penstock_common.types.data_parallel import (
    FirstRequest,
    GroupView,
    Pauses,
    RankGroup,
    RankReport,
    StartDpWave,
    StartWave,
    WaveComplete,
)


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
