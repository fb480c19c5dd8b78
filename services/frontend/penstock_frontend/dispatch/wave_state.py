"""State machine for the waves of a data-parallel group, as a frontend knows them."""

from typing import Self

import msgspec

from penstock_common.types.data_parallel import FirstRequest, GroupView, StartDpWave, StartWave


class Waves(msgspec.Struct, frozen=True, cache_hash=True):
    """State of the waves of one data-parallel group, as a frontend knows it.

    Each method handles an event, and returns the next state and the messages to send.

    The group counts as running only if the coordinator's view says so. Without a coordinator, the group counts as idle.
    If a running group counts as idle, the frontend sends start messages that are not needed but do no harm. If an idle
    group counts as running, the group starts its wave late. The rank that waits for the wave then sends its start
    message to its frontends again. The frontends pass the message on to the other ranks.
    """

    view: GroupView = GroupView()
    connected: bool = False
    """True while the frontend has a coordinator."""

    @property
    def running(self) -> bool:
        """True if the frontend assumes that the group is in a wave."""
        return self.connected and self.view.running

    def seen(self, view: GroupView) -> tuple[Self, tuple[FirstRequest | StartDpWave, ...]]:
        """Apply the coordinator's latest view of the group.

        If the view has an older epoch than the known one, or an older wave of the same epoch, update only ``connected``
        and ``pauses``.
        """
        if (view.group.epoch, view.wave) < (self.view.group.epoch, self.view.wave):
            view = self.view
        newest = msgspec.structs.replace(view, pauses=max(view.pauses, self.view.pauses))
        return msgspec.structs.replace(self, view=newest, connected=True), ()

    def disconnected(self) -> tuple[Self, tuple[FirstRequest | StartDpWave, ...]]:
        """Handle the loss of the coordinator."""
        return msgspec.structs.replace(self, connected=False), ()

    def sent(self, engine: str) -> tuple[Self, tuple[FirstRequest | StartDpWave, ...]]:
        """Handle a request that was sent to the rank ``engine``."""
        if self.running:
            return self, ()
        epoch, wave = self.view.group.epoch, self.view.wave
        first = (FirstRequest(engine, epoch, wave),) if self.connected else ()
        return self, first + self._start(excluded=engine)

    def start_wave(self, message: StartWave) -> tuple[Self, tuple[FirstRequest | StartDpWave, ...]]:
        """Handle the start message of a rank that waits for the other ranks in the first exchange of a wave."""
        view = self.view
        if message.epoch != view.group.epoch or message.wave < view.wave:
            return self, ()
        newer = msgspec.structs.replace(view, wave=message.wave, pauses=max(view.pauses, message.pauses))
        after = msgspec.structs.replace(self, view=newer)
        return after, after._start(excluded=message.engine)

    def _start(self, *, excluded: str) -> tuple[StartDpWave, ...]:
        group, wave, pauses = self.view.group, self.view.wave, self.view.pauses
        return tuple(StartDpWave(engine, group.epoch, wave, pauses) for engine in group.members if engine != excluded)
