"""How long a rank computes no steps while the members of its group change."""

from penstock_enginecore.core.scheduler.base import Clock


class Standstill:
    """Times the two ways in which a group changes, each until the new group's first exchange is over and steps may follow.

    A planned change stops steps from the end of the old group's last one, which is where the exchange begins in which all agree
    to switch. The loss of a group, also in the middle of a planned change, does from when this rank has seen it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._step_ended_at = 0.0
        self._switching_since: float | None = None
        self._lost_at: float | None = None
        self.num_switches = self.num_recoveries = 0
        """Planned changes that are over, and losses."""
        self.switch_seconds = self.recovery_seconds = 0.0
        """Of all of them together."""

    @property
    def seconds_since_loss(self) -> float:
        """Since the rank lost its group; 0 where it has one."""
        return 0.0 if self._lost_at is None else self._clock() - self._lost_at

    def exchanging(self) -> None:
        """An exchange begins: the step before it is over."""
        self._step_ended_at = self._clock()

    def switching(self) -> None:
        """In that exchange all have agreed to be in the next group."""
        self._switching_since = self._step_ended_at

    def lost(self) -> None:
        """The group is lost. Said again before another one has opened, it changes nothing."""
        self._switching_since = None
        if self._lost_at is None:
            self._lost_at = self._clock()

    def opened(self) -> bool:
        """The first exchange of a group is over. Returns whether one was lost before it."""
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
