"""How an engine drains and stops, as a state machine without I/O.

    RUNNING ──request() or drain()──> REQUESTED ──advance()──> DRAINING ──no requests left, after request()──> EXIT

``request`` may be called from a signal handler: it sets flags and nothing else. The busy loop calls ``advance`` and carries
out the effects.
"""

import enum


class ShutdownPhase(enum.IntEnum):
    """RUNNING takes requests; later phases refuse new ones."""

    RUNNING = 1
    REQUESTED = 2
    DRAINING = 3
    EXIT = 4


class ShutdownEffect(enum.Enum):
    """What the busy loop has to do."""

    ANNOUNCE_DRAINING = "tell the frontends that new requests are refused"
    ABORT_REQUESTS = "end the requests that are left, and the leases"


class ShutdownState:
    """``drain_timeout`` in seconds: how long requests in flight may go on. Times are monotonic seconds.

    An engine that was only told to drain stays, and takes no requests, until it is told to leave as well.
    """

    def __init__(self, drain_timeout: float) -> None:
        self.phase = ShutdownPhase.RUNNING
        self.deadline: float | None = None
        """When what is left ends; None when there is nothing to wait for."""
        self.timeout = drain_timeout
        self._leave_timeout: float | None = None
        self._drain_timeout = drain_timeout

    @property
    def refuses_requests(self) -> bool:
        """Whether new requests are turned away."""
        return self.phase is not ShutdownPhase.RUNNING

    @property
    def leaves(self) -> bool:
        """Whether the process ends once it has no requests."""
        return self._leave_timeout is not None

    def request(self, timeout: float | None = None) -> None:
        """Ask for the shutdown. Only the first one counts, and only it may bring a deadline of an earlier drain forward."""
        if self._leave_timeout is None:
            self._leave_timeout = self._drain_timeout if timeout is None else timeout
            self.drain(self._leave_timeout)

    def drain(self, timeout: float) -> None:
        """Ask to take no new requests, and to end what is left after ``timeout`` seconds. Only the first one counts."""
        if self.phase is ShutdownPhase.RUNNING:
            self.timeout = timeout
            self.phase = ShutdownPhase.REQUESTED

    def advance(self, now: float, *, has_requests: bool, has_leases: bool = False) -> list[ShutdownEffect]:
        """Move on as far as time, the requests in flight and, until the deadline, the leases of blocks allow. Returns what to do,
        in order.
        """
        effects = []
        if self.phase is ShutdownPhase.REQUESTED:
            self.phase = ShutdownPhase.DRAINING
            self.deadline = now + self.timeout
            effects.append(ShutdownEffect.ANNOUNCE_DRAINING)
        if self.phase is not ShutdownPhase.DRAINING:
            return effects
        if not has_requests and not (has_leases and self.deadline is not None):
            self.deadline = None
            if self.leaves:
                self.phase = ShutdownPhase.EXIT
            return effects
        if self.deadline is not None and self._leave_timeout is not None:
            self.deadline = min(self.deadline, now + self._leave_timeout)
        if self.deadline is not None and now >= self.deadline:
            self.deadline = None
            effects.append(ShutdownEffect.ABORT_REQUESTS)
        return effects
