"""What both clients are made of: the same arguments, and a connection."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from penstock_client.connection import Connection, Keepalive, Tls


class BaseClient(ABC):
    """A client before it is known whether threads or an event loop use it."""

    def __init__(
        self,
        address: str = "localhost:50051",
        *,
        key: str = "",
        tls: Tls | None = None,
        timeout: float | None = None,
        keepalive: Keepalive | None = None,
        options: Sequence[tuple[str, str | int]] = (),
    ) -> None:
        self._connection = Connection(address, key, tls, keepalive or Keepalive(), timeout, options)
        self._open(self._connection)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The gRPC metadata that is sent with every call."""
        return self._connection.metadata

    @abstractmethod
    def _open(self, connection: Connection) -> None:
        """Make the channel and the stub. Raises OSError."""
