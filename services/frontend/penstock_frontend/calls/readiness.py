"""Whether a frontend is to be sent requests."""

SEEN = "no engine has been seen yet"
FULL = "as many requests are in flight or held as may be"
DRAINING = "draining"


class Readiness:
    """Ready once an engine has taken requests, or, ``without_engines``, once there was a view of the cluster. From then on
    engines come and go and it stays ready, because requests are held meanwhile; not while it is full, and not from when it
    drains.
    """

    def __init__(self, *, without_engines: bool) -> None:
        self._without_engines = without_engines
        self._seen = False
        self._full = False
        self._draining = False
        self._left = False

    @property
    def ready(self) -> bool:
        """Whether to send requests here."""
        return not self.why

    @property
    def answers(self) -> bool:
        """Whether to begin calls here, for clients that choose among the frontends they know: also while it is full, because a
        refusal says when to try again, and while it drains and moves its clients. Those that leave all frontends that they know
        learn of no others, and their calls fail.
        """
        return self._seen and not self._left

    @property
    def why(self) -> str:
        """Why not; empty where it is ready."""
        if self._draining:
            return DRAINING
        if not self._seen:
            return SEEN
        return FULL if self._full else ""

    def update(self, *, engine: bool, view: bool, full: bool) -> bool:
        """What is so now: an engine takes requests, the coordinator has told of the cluster, no more requests may come in.
        Returns whether that changed ``ready`` or ``answers``.
        """
        before = self.ready, self.answers
        self._seen = self._seen or engine or (view and self._without_engines)
        self._full = full
        return (self.ready, self.answers) != before

    def drain(self, *, moves_clients: bool) -> None:
        """It is to stop. ``moves_clients``: and asks them meanwhile to connect anew, for which they look up who else there is."""
        self._draining = True
        self._left = not moves_clients

    def close(self) -> None:
        """It has drained, and refuses from now on."""
        self._left = True
