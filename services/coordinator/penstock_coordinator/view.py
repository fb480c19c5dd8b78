"""When the frontends are sent a view."""

from penstock_coordinator.pace import Pace

_NEARLY = 0.9
"""Part of an interval that counts as all of it, for who looks once per interval and is early by a hair."""


class ViewLimiter:
    """Decides when a view is due: soon when members or their states have changed, after the interval of views when only loads
    can have changed, and never before ``first_at``.

    The last rule makes a restart of the coordinator safe. The coordinator keeps nothing on disk and learns of the engines as they
    register again; a view with half of them would tell the frontends that the others are gone. Until then the frontends keep
    the view they have.
    """

    def __init__(self, pace: Pace, *, first_at: float) -> None:
        """``first_at``: a time of the clock whose ``now`` is passed in, in seconds."""
        self._pace = pace
        self._first_at = first_at
        self._sent_at: float | None = None
        self._changed_at: float | None = None
        self._num_engines = 0

    @property
    def interval(self) -> float:
        """Seconds after which to look again."""
        return self._pace.of_views(self._num_engines)

    def members_changed(self, now: float) -> None:
        """What is not in the last view is more than loads."""
        if self._changed_at is None:
            self._changed_at = now

    def due(self, now: float) -> bool:
        """Whether to send what has changed."""
        if now < self._first_at:
            return False
        if self._sent_at is None:
            return True
        passed = now - self._sent_at
        if self._changed_at is not None and passed >= self._pace.of_changes(self._num_engines):
            return True
        return passed >= self.interval * _NEARLY

    def waits(self, now: float) -> float | None:
        """Seconds until a change of the members is due that is not yet; None: there is none."""
        if self._changed_at is None or now < self._first_at or self._sent_at is None:
            return None
        return max(self._sent_at + self._pace.of_changes(self._num_engines) - now, 0.0)

    def sent(self, now: float, num_engines: int) -> float:
        """A view of so many engines was sent. Returns the time since which it was due."""
        since = now if self._changed_at is None else max(self._changed_at, self._first_at)
        self._sent_at, self._changed_at, self._num_engines = now, None, num_engines
        return since

    def only_loads(self) -> None:
        """What changed turned out to be in another view: nothing in this one has changed but loads."""
        self._changed_at = None
