"""How a rank meets the others of its group, over ``SocketCollectives``."""

import socket
from collections.abc import Mapping
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from penstock_common import addresses
from penstock_common.errors import ConfigError
from penstock_common.types.data_parallel import RankGroup
from penstock_enginecore.config import DataParallelConfig
from penstock_enginecore.core.data_parallel.broken import CollectiveBroken
from penstock_enginecore.parallel.gloo import Meeting
from penstock_enginecore.parallel.socket_collectives import SocketCollectives

_LOOPBACK = "127.0.0.1"
_TIMEOUT = timedelta(days=1)


class SocketLink:
    """A ``GroupLink``; ``collectives`` are those of the group, which steps use as well."""

    def __init__(self, group: RankGroup, rank: int, meeting: Meeting, timeout: float) -> None:
        """Meets nobody yet. ``timeout``: seconds in which all have to come."""
        self.collectives = SocketCollectives(f"group-{group.epoch}", rank, len(group.members))
        self._meeting = meeting
        self._timeout = timeout

    def connect(self) -> None:
        """See ``GroupLink``. Raises CollectiveBroken."""
        self.collectives.connect(self._meeting, self._timeout)

    def exchange(self, row: bytes) -> list[bytes]:
        """See ``GroupLink``. Raises CollectiveBroken."""
        return self.collectives.exchange(row)

    def abort(self) -> None:
        """See ``GroupLink``."""
        self.collectives.abort()

    def close(self) -> None:
        """See ``GroupLink``."""
        self.collectives.close()


class SocketLinks:
    """Makes links, and keeps the store at which a group meets whose first rank this one is."""

    def __init__(self, config: DataParallelConfig, rank: str) -> None:
        """``rank``: this one's name. Listens on a free port. Raises ConfigError where this host has no such address."""
        self._rank = rank
        self._timeout = config.connect_timeout
        self._address = config.address
        address = config.address or _LOOPBACK
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listening = socket.create_server((address, 0), family=family)
        except OSError as e:
            raise ConfigError(f"data_parallel.address is {address!r}, where nothing can listen here: {e}") from None
        port = listening.getsockname()[1]
        self._store = TCPStore(
            address,
            port,
            is_master=True,
            timeout=_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        self.meeting_address = addresses.with_port(address, port)

    def make(self, group: RankGroup, meetings: Mapping[str, str]) -> SocketLink:
        """The link of a group that this rank is in. Raises CollectiveBroken where nobody knows its first rank's store."""
        if group.members[0] not in meetings:
            raise CollectiveBroken(f"nobody has told where {group.members[0]} is met")
        meeting = Meeting(at=meetings[group.members[0]], address=self._address)
        return SocketLink(group, group.members.index(self._rank), meeting, self._timeout)
