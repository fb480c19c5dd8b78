"""Draining and shutdown of an engine, as a state machine without I/O.

    RUNNING ──request() or drain()──> REQUESTED ──advance()──> DRAINING ──no requests left, after request()──> EXIT

``request`` only sets flags, so signal handlers may call it. The busy loop calls ``advance`` and carries out the
returned effects.
"""

import enum


class ShutdownPhase(enum.IntEnum):
    """Phase of the shutdown. In the phase RUNNING, the engine accepts requests. In later phases, the engine refuses new
    requests.
    """

    RUNNING = 1
    REQUESTED = 2
    DRAINING = 3
    EXIT = 4


class ShutdownEffect(enum.Enum):
    """Action that the busy loop must carry out."""

    ANNOUNCE_DRAINING = "telling the frontends that the engine refuses new requests"
    ABORT_REQUESTS = "ending the remaining requests and the leases of KV blocks"


class ShutdownState:
    """State machine of draining and shutdown. Points in time are in monotonic seconds.

    ``drain_timeout`` is the time in seconds after which running requests are ended. After ``drain``, the process
    refuses new requests but keeps running. After ``request``, the process exits once no request is left.
    """

    def __init__(self, drain_timeout: float) -> None:
        self.phase = ShutdownPhase.RUNNING
        self.deadline: float | None = None
        """Time at which the engine ends the remaining requests, or None if the engine is not waiting for a deadline."""
        self.timeout = drain_timeout
        self._leave_timeout: float | None = None
        self._drain_timeout = drain_timeout

    @property
    def refuses_requests(self) -> bool:
        """Whether new requests are refused."""
        return self.phase is not ShutdownPhase.RUNNING

    @property
    def leaves(self) -> bool:
        """Whether the process exits once it has no requests."""
        return self._leave_timeout is not None

    def request(self, timeout: float | None = None) -> None:
        """Request the shutdown. Only the first call has an effect. The call can shorten, but not extend, the deadline
        of an earlier ``drain``.
        """
        if self._leave_timeout is None:
            self._leave_timeout = self._drain_timeout if timeout is None else timeout
            self.drain(self._leave_timeout)

    def drain(self, timeout: float) -> None:
        """Refuse new requests, and end the remaining requests after ``timeout`` seconds. Only the first call has an
        effect.
        """
        if self.phase is ShutdownPhase.RUNNING:
            self.timeout = timeout
            self.phase = ShutdownPhase.REQUESTED

    def advance(self, now: float, *, has_requests: bool, has_leases: bool = False) -> list[ShutdownEffect]:
        """Advance the phase and return the actions to carry out, in order.

        Until the deadline, leases on KV blocks delay the exit of the process as unfinished requests do.
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
