"""How an engine stops, as a state machine without I/O.

    RUNNING ──request()──> REQUESTED ──advance()──> SHUTTING_DOWN ──no requests left──> EXIT

``request`` may be called from a signal handler: it sets the phase and nothing else. The busy loop calls ``advance`` and
carries out the effects.
"""

import enum


class ShutdownPhase(enum.IntEnum):
    """RUNNING takes requests; later phases refuse new ones."""

    RUNNING = 1
    REQUESTED = 2
    SHUTTING_DOWN = 3
    EXIT = 4


class ShutdownEffect(enum.Enum):
    """What the busy loop has to do."""

    ANNOUNCE_DRAINING = "tell the frontends that new requests are refused"
    ABORT_REQUESTS = "end the requests that are left"


class ShutdownState:
    """``drain_timeout`` in seconds: how long requests in flight may go on. Times are monotonic seconds."""

    def __init__(self, drain_timeout: float) -> None:
        self.phase = ShutdownPhase.RUNNING
        self.deadline: float | None = None
        self._drain_timeout = drain_timeout
        self._aborted = False

    @property
    def refuses_requests(self) -> bool:
        """Whether new requests are turned away."""
        return self.phase is not ShutdownPhase.RUNNING

    def request(self) -> None:
        """Ask for the shutdown. More than once is the same as once."""
        if self.phase is ShutdownPhase.RUNNING:
            self.phase = ShutdownPhase.REQUESTED

    def advance(self, now: float, *, has_requests: bool) -> list[ShutdownEffect]:
        """Move on as far as time and the requests in flight allow. Returns what to do, in order."""
        effects = []
        if self.phase is ShutdownPhase.REQUESTED:
            self.phase = ShutdownPhase.SHUTTING_DOWN
            self.deadline = now + self._drain_timeout
            effects.append(ShutdownEffect.ANNOUNCE_DRAINING)
        if self.phase is ShutdownPhase.SHUTTING_DOWN and self.deadline is not None:
            if not has_requests:
                self.phase = ShutdownPhase.EXIT
            elif now >= self.deadline and not self._aborted:
                self._aborted = True
                effects.append(ShutdownEffect.ABORT_REQUESTS)
        return effects
