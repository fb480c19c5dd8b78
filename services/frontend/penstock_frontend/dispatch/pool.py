"""The connections to all engines, following the list of engines, and what goes to an engine on them."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

from penstock_common.errors import Internal
from penstock_common.rpc.credentials import ClientCredentials
from penstock_common.security.certificates import Certificates
from penstock_common.types.cluster import ClusterView, EngineState
from penstock_common.types.data_parallel import FirstRequest, StartDpWave, StartWave
from penstock_common.types.kv_transfer import EngineRole
from penstock_common.types.media import MODALITIES, MultiModalFeature
from penstock_common.types.outputs import EngineCoreOutputs, EngineReady
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.config import FrontendConfig
from penstock_frontend.dispatch.connection import ConnectionListener, EngineConnection
from penstock_frontend.dispatch.groups import EngineGroups
from penstock_frontend.dispatch.router import Candidate
from penstock_frontend.dispatch.subset import Subset
from penstock_frontend.rpc.engine_session import SessionEnd
from penstock_frontend.rpc.media_transport import MediaCounts, MediaTransport

LORA = "lora"
"""The capability of engines that apply LoRA adapters."""
KV_TRANSFER = "kv_transfer"
"""The capability of engines that hand requests over."""


class EnginePool:
    """One connection per engine address. What happens on connections is passed on to who ``listen``s.

    What counts is the session: an engine that leaves the list keeps its connection as long as the session holds, so that
    no stream breaks because of what a coordinator says or fails to say. When the session breaks it is given up. One that lives
    and is not in this frontend's subset of the engines gets no new requests, and is given up as soon as it has none.
    """

    def __init__(
        self,
        config: FrontendConfig,
        *,
        incarnation: str,
        certificates: Certificates,
        on_first_request: Callable[[FirstRequest], None],
    ) -> None:
        """``certificates``: told when those of these connections end. ``on_first_request``: called when a request went to a
        data-parallel group believed idle. Raises ConfigError.
        """
        self.view = ClusterView()
        """The coordinator's last view; empty where there is no coordinator."""
        self._config = config
        self._credentials = ClientCredentials(config.engine_tls, field="engine_tls", certificates=certificates)
        self._incarnation = incarnation
        self._media = MediaTransport(incarnation)
        self._listener: ConnectionListener | None = None
        self._connections: dict[str, EngineConnection] = {}
        self._candidates: Sequence[Candidate] | None = None
        """None: to be made anew."""
        self._subset = Subset(config.name, config.coordinator.max_engines)
        self._wanted: frozenset[str] = frozenset()
        self._spare: frozenset[str] = frozenset()
        """Addresses of engines that live and are not in the subset."""
        self._closing: set[asyncio.Task[None]] = set()
        self._groups = EngineGroups(self._tell_group)
        self._on_first_request = on_first_request

    def listen(self, listener: ConnectionListener) -> None:
        """Who is told what happens on connections. To be called before there is one."""
        self._listener = listener

    def __iter__(self) -> Iterator[EngineConnection]:
        """All connections, up or not, in a stable order."""
        return iter([connection for _, connection in sorted(self._connections.items())])

    def candidates(self) -> Sequence[Candidate]:
        """All engines, connected or not, as the router sees them. Kept between changes: there may be a thousand."""
        if self._candidates is None:
            self._candidates = self._current_candidates()
        return self._candidates

    def _current_candidates(self) -> list[Candidate]:
        return [
            Candidate(
                connection.address,
                connection.rank,
                accepting=connection.state is EngineState.SERVING
                and connection.address not in self._spare
                and (connection.group_rank is None or self._groups.accepts(connection.group_rank)),
                variant=connection.ready.config_hash if connection.ready else "",
                applies_lora=connection.ready is None or LORA in connection.ready.capabilities,
                modalities=MODALITIES
                if connection.ready is None
                else tuple(each.modality for each in connection.ready.media),
                role=EngineRole.BOTH if connection.ready is None else connection.ready.role,
                fingerprint=_fingerprint(connection.ready),
            )
            for connection in self
        ]

    def send(self, engine: str, request: EngineCoreRequest, *, first: bool) -> None:
        """Start a request on an engine with a session. ``first``: it had nothing to do for this frontend. Raises Internal when
        there is no session.
        """
        connection = self._connections.get(engine)
        if connection is None or connection.session is None:
            raise Internal(f"the router picked {engine}, which has no session")
        if first:
            connection.heard()  # it has not been silent: there was nothing to say
        rank = connection.group_rank
        if rank is None:
            connection.session.add(request)
            return
        connection.session.add(self._groups.stamped(rank, request))
        self._groups.sent(rank)

    def _tell_group(self, message: FirstRequest | StartDpWave) -> None:
        if isinstance(message, FirstRequest):
            self._on_first_request(message)
            return
        for connection in self.connected():
            if connection.group_rank == message.engine and connection.session is not None:
                connection.session.start_dp_wave(message)

    def coordinator_lost(self) -> None:
        """No views come in: groups are told of waves without it."""
        self._groups.disconnected()

    def abort_on(self, engine: str, request_ids: Sequence[str], reason: str) -> None:
        connection = self._connections.get(engine)
        if connection is not None and connection.session is not None:
            connection.session.abort(request_ids, reason)

    def hand_over(self, engine: str, request_ids: Sequence[str]) -> None:
        connection = self._connections.get(engine)
        if connection is not None and connection.session is not None:
            connection.session.hand_over(request_ids)

    @property
    def media_counts(self) -> MediaCounts:
        """What has been sent of media."""
        return self._media.counts

    def holding(self, features: Sequence[MultiModalFeature]) -> dict[str, list[MultiModalFeature]]:
        """By engine, those of the features that it has; engines that have none are not in it."""
        held: dict[str, list[MultiModalFeature]] = {}
        for connection in self.connected():
            kept = None if connection.session is None else connection.session.media
            if kept and (found := [feature for feature in features if feature.identifier in kept]):
                held[connection.address] = found
        return held

    def connected(self) -> Sequence[EngineConnection]:
        """Engines with a session."""
        return [connection for connection in self if connection.session is not None]

    def computing(self) -> Sequence[EngineConnection]:
        """Of those the ones that compute, and do not wait for a place in a data-parallel group."""
        return [connection for connection in self.connected() if not self._has_no_place(connection)]

    def _has_no_place(self, connection: EngineConnection) -> bool:
        rank, status = connection.group_rank, connection.status
        return rank is not None and status is not None and self._groups.leaves_out(rank, status.model, status.pool)

    def follow(self, addresses: Iterable[str]) -> None:
        """Connect to these, and give up others as soon as they have no session. The rank of each is its place among them, from 0:
        what engines that know nothing of each other call their rank would be the same for all.
        """
        places = {address: place for place, address in enumerate(dict.fromkeys(addresses))}
        self._connect(places)
        for address, place in places.items():
            self._connections[address].rank = place
        self._candidates = None

    def _connect(self, addresses: Iterable[str]) -> None:
        self._wanted = frozenset(addresses)
        self._candidates = None
        for address in sorted(self._wanted - self._connections.keys()):
            self._connections[address] = EngineConnection(
                address,
                self._config,
                incarnation=self._incarnation,
                listener=self,
                on_lost=self._give_up_unwanted,
                credentials=self._credentials,
                media=self._media,
            )
        for connection in self:
            self._give_up_unwanted(connection)

    def follow_view(self, view: ClusterView) -> None:
        """Connect to the living engines of a view, and remember what it says of each. One that a view does not name any more has
        lost its lease: it is asked how it is. It keeps its rank until another engine has its index.
        """
        self.view = view
        self._groups.follow_view(view)
        living = [status for status in view.engines if status.state is not EngineState.DEAD]
        wanted = frozenset(status.address for status in self._subset.of(living))
        self._spare = frozenset(status.address for status in living) - wanted
        self._connect(wanted)
        for status in view.engines:
            if (connection := self._connections.get(status.address)) is not None:
                connection.status, connection.rank = status, status.index
        taken = {status.index for status in view.engines}
        for connection in self:
            named = connection.address in self._wanted or connection.address in self._spare
            connection.in_view(named)
            if not named and connection.rank in taken:
                connection.rank = None
        self._candidates = None

    def on_up(self, connection: EngineConnection) -> None:
        self._candidates = None
        self._told.on_up(connection)

    def on_outputs(self, connection: EngineConnection, outputs: EngineCoreOutputs) -> None:
        stats = outputs.scheduler_stats
        if stats is not None and stats.wedged != connection.stats.wedged:
            self._candidates = None
        self._told.on_outputs(connection, outputs)

    def on_draining(self, connection: EngineConnection, time_left: float | None) -> None:
        """The engine takes no more requests."""
        self._candidates = None
        self._told.on_draining(connection, time_left)

    def on_down(self, connection: EngineConnection, end: SessionEnd) -> None:
        """The session is over."""
        self._candidates = None
        self._told.on_down(connection, end)

    def on_fate(self, connection: EngineConnection, *, lives: bool) -> None:
        """It is known whether an engine lives whose session ended, and not by it."""
        self._told.on_fate(connection, lives=lives)

    def on_start_wave(self, message: StartWave) -> None:
        """A rank waits for the others of its group."""
        self._groups.start_wave(message)

    def has_work(self, connection: EngineConnection) -> bool:
        return self._told.has_work(connection)

    @property
    def _told(self) -> ConnectionListener:
        if self._listener is None:
            raise RuntimeError("nobody listens to the pool's connections")
        return self._listener

    def _idle_spare(self, connection: EngineConnection) -> bool:
        return connection.address in self._spare and not self.has_work(connection)

    async def close(self) -> None:
        """End all sessions."""
        self._wanted = frozenset()
        await asyncio.gather(*(connection.close() for connection in self), *self._closing)
        self._media.close()

    def _give_up_unwanted(self, connection: EngineConnection) -> None:
        if connection.address in self._wanted or (connection.session is not None and not self._idle_spare(connection)):
            return
        self._connections.pop(connection.address, None)
        self._candidates = None
        connection.presume_dead()
        task = asyncio.create_task(connection.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _fingerprint(ready: EngineReady | None) -> bytes:
    """Of blocks that an engine gives away; empty where it gives none."""
    gives = ready is not None and KV_TRANSFER in ready.capabilities and ready.kv_address
    return ready.kv_fingerprint if ready is not None and gives else b""
