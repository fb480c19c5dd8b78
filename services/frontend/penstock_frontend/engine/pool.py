"""The connections to all engines, following the list of engines."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence

from penstock_common.rpc.credentials import ClientCredentials
from penstock_common.types.cluster import ClusterView, EngineState
from penstock_common.types.outputs import EngineCoreOutputs
from penstock_frontend.config import FrontendConfig
from penstock_frontend.engine.connection import ConnectionListener, EngineConnection


class EnginePool:
    """One connection per engine address.

    What counts is the session: an engine that leaves the list keeps its connection as long as the session holds, so that
    no stream breaks because of what a coordinator says or fails to say. When the session breaks it is given up.
    """

    def __init__(self, config: FrontendConfig, *, incarnation: str, listener: ConnectionListener) -> None:
        self._config = config
        self._credentials = ClientCredentials(config.engine_tls, field="engine_tls")
        self._incarnation = incarnation
        self._listener = listener
        self._connections: dict[str, EngineConnection] = {}
        self._wanted: frozenset[str] = frozenset()
        self._closing: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[EngineConnection]:
        """All connections, up or not, in a stable order."""
        return iter([connection for _, connection in sorted(self._connections.items())])

    def get(self, address: str) -> EngineConnection | None:
        """The connection to an address."""
        return self._connections.get(address)

    def connected(self) -> Sequence[EngineConnection]:
        """Engines with a session."""
        return [connection for connection in self if connection.session is not None]

    def follow(self, addresses: Iterable[str]) -> None:
        """Connect to these, and give up others as soon as they have no session. The rank of each is its place among them, from 0:
        what engines that know nothing of each other call their rank would be the same for all.
        """
        places = {address: place for place, address in enumerate(dict.fromkeys(addresses))}
        self._connect(places)
        for address, place in places.items():
            self._connections[address].rank = place

    def _connect(self, addresses: Iterable[str]) -> None:
        self._wanted = frozenset(addresses)
        for address in sorted(self._wanted - self._connections.keys()):
            self._connections[address] = EngineConnection(
                address,
                self._config,
                incarnation=self._incarnation,
                listener=self,
                credentials=self._credentials,
            )
        for connection in self:
            self._give_up_unwanted(connection)

    def follow_view(self, view: ClusterView) -> None:
        """Connect to the living engines of a view, and remember what it says of each. One that a view does not name any more has
        lost its lease: it is asked how it is. It keeps its rank until another engine has its index.
        """
        self._connect(status.address for status in view.engines if status.state is not EngineState.DEAD)
        for status in view.engines:
            if (connection := self._connections.get(status.address)) is not None:
                connection.status, connection.rank = status, status.index
        taken = {status.index for status in view.engines}
        for connection in self:
            named = connection.address in self._wanted
            connection.in_view(named)
            if not named and connection.rank in taken:
                connection.rank = None

    async def close(self) -> None:
        """End all sessions."""
        self._wanted = frozenset()
        await asyncio.gather(*(connection.close() for connection in self), *self._closing)

    def on_up(self, connection: EngineConnection) -> None:
        """See ConnectionListener."""
        self._listener.on_up(connection)

    def on_outputs(self, connection: EngineConnection, outputs: EngineCoreOutputs) -> None:
        """See ConnectionListener."""
        self._listener.on_outputs(connection, outputs)

    def on_draining(self, connection: EngineConnection, time_left: float | None) -> None:
        """See ConnectionListener."""
        self._listener.on_draining(connection, time_left)

    def has_work(self, connection: EngineConnection) -> bool:
        """See ConnectionListener."""
        return self._listener.has_work(connection)

    def on_down(self, connection: EngineConnection, reason: str) -> None:
        """See ConnectionListener."""
        self._listener.on_down(connection, reason)
        self._give_up_unwanted(connection)

    def _give_up_unwanted(self, connection: EngineConnection) -> None:
        if connection.address in self._wanted or connection.session is not None:
            return
        self._connections.pop(connection.address, None)
        task = asyncio.create_task(connection.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
