"""What a frontend believes of the waves of a data-parallel group, as a state machine."""

from typing import Self

import msgspec

from penstock_common.types.data_parallel import FirstRequest, GroupView, StartDpWave, StartWave

# What a frontend believes of the waves of a data-parallel group, as a state machine.


class Waves(msgspec.Struct, frozen=True, cache_hash=True):
    """A frontend's belief. Every method is an event, and returns the next state and what is sent.

    Only the coordinator's word lets it believe that the group runs; without a coordinator, it is believed idle. Believing wrongly
    that it is idle costs messages that change nothing. Believing wrongly that it runs costs the time until the rank that waits
    says so again, to its frontends too, and these pass it on.
    """

    view: GroupView = GroupView()
    connected: bool = False
    """Whether there is a coordinator."""

    @property
    def running(self) -> bool:
        """Whether the group is believed to be in a wave."""
        return self.connected and self.view.running

    def seen(self, view: GroupView) -> tuple[Self, tuple[FirstRequest | StartDpWave, ...]]:
        """The coordinator's view. One of an older epoch, or an older wave of it, changes nothing but the connection."""
        if (view.group.epoch, view.wave) < (self.view.group.epoch, self.view.wave):
            view = self.view
        newest = msgspec.structs.replace(view, pauses=max(view.pauses, self.view.pauses))
        return msgspec.structs.replace(self, view=newest, connected=True), ()

    def disconnected(self) -> tuple[Self, tuple[FirstRequest | StartDpWave, ...]]:
        """The coordinator is gone."""
        return msgspec.structs.replace(self, connected=False), ()

    def sent(self, engine: str) -> tuple[Self, tuple[FirstRequest | StartDpWave, ...]]:
        """A request went to this rank."""
        if self.running:
            return self, ()
        epoch, wave = self.view.group.epoch, self.view.wave
        first = (FirstRequest(engine, epoch, wave),) if self.connected else ()
        return self, first + self._start(excluded=engine)

    def start_wave(self, message: StartWave) -> tuple[Self, tuple[FirstRequest | StartDpWave, ...]]:
        """A rank waits for the others in the first exchange of a wave."""
        view = self.view
        if message.epoch != view.group.epoch or message.wave < view.wave:
            return self, ()
        newer = msgspec.structs.replace(view, wave=message.wave, pauses=max(view.pauses, message.pauses))
        after = msgspec.structs.replace(self, view=newer)
        return after, after._start(excluded=message.engine)

    def _start(self, *, excluded: str) -> tuple[StartDpWave, ...]:
        group, wave, pauses = self.view.group, self.view.wave, self.view.pauses
        return tuple(StartDpWave(engine, group.epoch, wave, pauses) for engine in group.members if engine != excluded)
