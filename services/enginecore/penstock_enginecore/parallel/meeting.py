"""Where processes that compute together find each other."""

from dataclasses import dataclass

from penstock_common.security.shared_secret import NO_SECRET, SharedSecret
from penstock_enginecore.parallel.meeting_store import PURPOSE


@dataclass(frozen=True, slots=True)
class Meeting:
    """A place, at which several groups may meet.

    ``at``: for processes of one host a descriptor of memory that they share, empty at first; for processes of several hosts the
    address, host:port, of a ``MeetingServer``. ``address``: the IP address at which others reach this process, where they are on
    other hosts. ``secret``: by which they recognize each other there.
    """

    at: int | str
    address: str = ""
    secret: SharedSecret | None = None

    def key(self, purpose: str) -> bytes:
        """Return the key for ``purpose``; without a secret it is one that everybody knows who knows the purpose."""
        return (self.secret or NO_SECRET).key(purpose)

    @property
    def store_key(self) -> bytes:
        """The key of the ``MeetingServer``."""
        return self.key(PURPOSE)
