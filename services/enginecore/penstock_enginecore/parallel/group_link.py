"""How a rank meets the others of its group, over ``SocketCollectives``."""

from collections.abc import Mapping

from penstock_common.errors import ConfigError
from penstock_common.security.shared_secret import SharedSecret
from penstock_common.types.data_parallel import RankGroup
from penstock_enginecore.config import DataParallelConfig
from penstock_enginecore.core.collective_errors import CollectiveBroken
from penstock_enginecore.parallel.meeting import Meeting
from penstock_enginecore.parallel.meeting_server import MeetingServer
from penstock_enginecore.parallel.socket_collectives import SocketCollectives

_LOOPBACK = "127.0.0.1"


class SocketLink:
    """A ``GroupLink``; ``collectives`` are those of the group, which steps use as well."""

    def __init__(self, group: RankGroup, rank: int, meeting: Meeting, timeout: float, silence: float) -> None:
        """Meets nobody yet. ``timeout``: seconds in which all have to come. ``silence``: see ``SocketCollectives``."""
        self.collectives = SocketCollectives(f"group-{group.epoch}", rank, len(group.members), silence)
        self._meeting = meeting
        self._timeout = timeout

    def connect(self) -> None:
        """See ``GroupLink``. Raises CollectiveBroken."""
        self.collectives.connect(self._meeting, self._timeout)

    def exchange(self, row: bytes) -> list[bytes]:
        """See ``GroupLink``. Raises CollectiveBroken."""
        return self.collectives.exchange(row)

    def abort(self) -> None:
        self.collectives.abort()

    def close(self) -> None:
        self.collectives.close()


class SocketLinks:
    """Makes links, and keeps the store at which a group meets whose first rank this one is."""

    def __init__(self, config: DataParallelConfig, rank: str, secret: SharedSecret | None = None) -> None:
        """``rank``: this one's name. ``secret``: by which ranks recognize each other. Listens on a free port. Raises ConfigError
        where this host has no such address.
        """
        self.lease = 0.0
        self._rank = rank
        self._timeout = config.connect_timeout
        self._address = config.address
        self._secret = secret
        try:
            self._server = MeetingServer(config.address or _LOOPBACK, secret)
        except OSError as e:
            raise ConfigError(
                f"data_parallel.address is {config.address!r}, where nothing can listen here: {e}"
            ) from None
        self.meeting_address = self._server.address

    def make(self, group: RankGroup, meetings: Mapping[str, str]) -> SocketLink:
        """The link of a group that this rank is in. Raises CollectiveBroken where nobody knows its first rank's store."""
        if group.members[0] not in meetings:
            raise CollectiveBroken(f"nobody has told where {group.members[0]} is met")
        meeting = Meeting(at=meetings[group.members[0]], address=self._address, secret=self._secret)
        return SocketLink(group, group.members.index(self._rank), meeting, self._timeout, self.lease)
