"""Connections to all engines, the selection of engines for this frontend, and data-parallel groups."""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from penstock_common.errors import Internal, RequestFailed, request_failed
from penstock_common.rpc.credentials import ClientCredentials
from penstock_common.security.tls import Certificates
from penstock_common.types.cluster import ClusterView, EngineState, EngineStatus
from penstock_common.types.data_parallel import FirstRequest, PoolGroup, StartDpWave, StartWave
from penstock_common.types.kv_transfer import EngineRole
from penstock_common.types.media import MODALITIES, MultiModalFeature
from penstock_common.types.outputs import EngineCoreOutputs, EngineReady
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.config import FrontendConfig
from penstock_frontend.dispatch.connection import ConnectionListener, EngineConnection
from penstock_frontend.dispatch.router import Candidate
from penstock_frontend.dispatch.wave_state import Waves
from penstock_frontend.rpc.engine_session import SessionEnd
from penstock_frontend.rpc.media_transport import MediaCounts, MediaTransport


class Subset:
    """Selects at most ``max_engines`` engines of a view.

    Serving engines come first, then engines with the highest hash of frontend and engine.

    With this hash, about the same number of frontends use each engine. If an engine joins or leaves, only some subsets
    change, each by one engine (rendezvous hashing, Thaler and Ravishankar 1998).
    """

    def __init__(self, frontend: str, max_engines: int) -> None:
        self._key = hashlib.blake2b(frontend.encode(), digest_size=16).digest()
        self._max_engines = max_engines
        self._weights: dict[str, bytes] = {}

    def of(self, engines: Sequence[EngineStatus]) -> Sequence[EngineStatus]:
        """Return the selected engines. If there are at most ``max_engines``, return all engines."""
        if len(engines) <= self._max_engines:
            return engines
        known = self._weights
        self._weights = {e.engine_id: known.get(e.engine_id) or self._weight(e.engine_id) for e in engines}
        serving_first = sorted(
            engines, key=lambda e: (e.state is EngineState.SERVING, self._weights[e.engine_id]), reverse=True
        )
        return serving_first[: self._max_engines]

    def _weight(self, engine_id: str) -> bytes:
        return hashlib.blake2b(engine_id.encode(), key=self._key, digest_size=8).digest()


# The class below tracks which ranks of data-parallel groups accept requests, and which ranks must start a wave.

Send = Callable[[FirstRequest | StartDpWave], None]


class EngineGroups:
    """Tracks the data-parallel group of each pool as the coordinator reports it, and sends wave messages.

    Ranks are identified by name.
    """

    def __init__(self, send: Send) -> None:
        """``send`` sends a ``FirstRequest`` message to the coordinator, or the start of a wave to a rank."""
        self._send = send
        self._waves: dict[tuple[str, str], Waves] = {}
        self._routed: dict[tuple[str, str], frozenset[str]] = {}
        self._pool_of: dict[str, tuple[str, str]] = {}
        """Pool (model and name) of each rank that is a member of a group."""

    def follow_view(self, view: ClusterView) -> None:
        """Apply the coordinator's view of the groups. Older epochs and waves are ignored."""
        for told in view.groups:
            self._follow(told)

    def _follow(self, told: PoolGroup) -> None:
        key = told.model, told.pool
        waves, _ = self._waves.get(key, Waves()).seen(told.view)
        self._waves[key] = waves
        group = waves.view.group
        if group.epoch == told.view.group.epoch:
            self._routed[key] = frozenset() if told.suspended else frozenset(told.view.routed)
        self._pool_of = {rank: pool for rank, pool in self._pool_of.items() if pool != key}
        self._pool_of.update((rank, key) for rank in group.members)

    def disconnected(self) -> None:
        """Treat all groups as idle while there is no coordinator."""
        self._waves = {key: waves.disconnected()[0] for key, waves in self._waves.items()}

    def accepts(self, rank: str) -> bool:
        """Return True if requests may be sent to a rank.

        The rank must be a member of its group, and must not be leaving the group. The group must not be suspended for
        lack of ranks. Before the coordinator's first report on groups, every rank accepts requests.
        """
        if not self._waves:
            return True
        key = self._pool_of.get(rank)
        return key is not None and rank in self._routed[key]

    def leaves_out(self, rank: str, model: str, pool: str) -> bool:
        """Return True if the pool has a group, and this engine is not a member of it."""
        waves = self._waves.get((model, pool))
        members = () if waves is None else waves.view.group.members
        return bool(members) and rank not in members

    def stamped(self, rank: str, request: EngineCoreRequest) -> EngineCoreRequest:
        """Return the request with the epoch and wave of the rank's group."""
        view = self._believed(rank).view
        return msgspec.structs.replace(request, group_epoch=view.group.epoch, current_wave=view.wave)

    def sent(self, rank: str) -> None:
        """Handle a request that was sent to a rank.

        If the rank's group counts as idle, notify the other ranks and the coordinator.
        """
        if rank in self._pool_of:
            self._tell(self._believed(rank).sent(rank)[1])

    def start_wave(self, message: StartWave) -> None:
        """Handle the message of a rank that waits for the other ranks of its group."""
        key = self._pool_of.get(message.engine)
        if key is not None:
            self._waves[key], told = self._waves[key].start_wave(message)
            self._tell(told)

    def _believed(self, rank: str) -> Waves:
        key = self._pool_of.get(rank)
        return Waves() if key is None else self._waves[key]

    def _tell(self, messages: Iterable[FirstRequest | StartDpWave]) -> None:
        for message in messages:
            self._send(message)


def error_of_engine(engine: str, error: RequestFailed) -> RequestFailed:
    """Return the same error with the engine's name in its message."""
    failed = request_failed(error.code, f"engine {engine}: {error.message}", field=error.field, reason=error.reason)
    failed.retry_after = error.retry_after
    return failed


LORA = "lora"
"""Capability of engines that apply LoRA adapters."""
KV_TRANSFER = "kv_transfer"
"""Capability of engines that hand requests over to other engines."""


class EnginePool:
    """Keeps one connection per engine address, and passes the connections' events to the listener.

    If an engine leaves the list of engines, its connection stays open until the session breaks. A change of the
    coordinator's view therefore breaks no stream. A live engine outside this frontend's subset gets no new requests.
    The pool closes the connection of such an engine once the engine has no requests of this frontend.
    """

    def __init__(
        self,
        config: FrontendConfig,
        *,
        incarnation: str,
        certificates: Certificates,
        on_first_request: Callable[[FirstRequest], None],
    ) -> None:
        """Args:
            config: the frontend's settings.
            incarnation: incarnation of this frontend.
            certificates: records when the certificates of these connections expire.
            on_first_request: called when a request was sent to a data-parallel group that counts as idle.

        Raises:
            ConfigError: the TLS settings are not valid.
        """
        self.view = ClusterView()
        """The coordinator's latest view; empty without a coordinator."""
        self._config = config
        self._credentials = ClientCredentials(config.engine_tls, field="engine_tls", certificates=certificates)
        self._incarnation = incarnation
        self._media = MediaTransport(incarnation)
        self._listener: ConnectionListener | None = None
        self._connections: dict[str, EngineConnection] = {}
        self._candidates: Sequence[Candidate] | None = None
        """Cached list of candidates, or None if it must be rebuilt."""
        self._subset = Subset(config.name, config.coordinator.max_engines)
        self._wanted: frozenset[str] = frozenset()
        self._spare: frozenset[str] = frozenset()
        """Addresses of live engines that are not in the subset."""
        self._closing: set[asyncio.Task[None]] = set()
        self._groups = EngineGroups(self._tell_group)
        self._on_first_request = on_first_request

    def listen(self, listener: ConnectionListener) -> None:
        """Set the listener of connection events. Must be called before the first connection."""
        self._listener = listener

    def __iter__(self) -> Iterator[EngineConnection]:
        """Iterate over all connections in a stable order, including connections without a session."""
        return iter([connection for _, connection in sorted(self._connections.items())])

    def candidates(self) -> Sequence[Candidate]:
        """Return all engines as candidates for the router, including engines without a connection.

        The list is cached, because there may be a thousand engines.
        """
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
        """Start a request on an engine with a session. Raises Internal if there is no session.

        ``first`` is True if the engine had no requests of this frontend before.
        """
        connection = self._connections.get(engine)
        if connection is None or connection.session is None:
            raise Internal(f"the router picked {engine}, which has no session")
        if first:
            connection.heard()  # the engine had no work until now, so do not count its silence
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
        """Handle the loss of the coordinator.

        Until a coordinator returns, this pool announces waves to groups itself.
        """
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
        """Counters of media sent to engines."""
        return self._media.counts

    def holding(self, features: Sequence[MultiModalFeature]) -> dict[str, list[MultiModalFeature]]:
        """Return, by engine, which of the features the engine has cached. Leave out engines without cached features."""
        held: dict[str, list[MultiModalFeature]] = {}
        for connection in self.connected():
            kept = None if connection.session is None else connection.session.media
            if kept and (found := [feature for feature in features if feature.identifier in kept]):
                held[connection.address] = found
        return held

    def connected(self) -> Sequence[EngineConnection]:
        """Return the engines with a session."""
        return [connection for connection in self if connection.session is not None]

    def computing(self) -> Sequence[EngineConnection]:
        """Return the connected engines, except engines that wait to become members of a data-parallel group."""
        return [connection for connection in self.connected() if not self._has_no_place(connection)]

    def _has_no_place(self, connection: EngineConnection) -> bool:
        rank, status = connection.group_rank, connection.status
        return rank is not None and status is not None and self._groups.leaves_out(rank, status.model, status.pool)

    def follow(self, addresses: Iterable[str]) -> None:
        """Connect to these addresses. Close connections to other addresses once they have no session.

        An engine's rank is its position in the list, from 0. The rank that an engine reports cannot be used, because
        engines outside a data-parallel group all report the same rank.
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
        """Connect to the live engines of a view, and store the status of each.

        An engine that is missing in the view has lost its lease, so the frontend probes it. The engine keeps its rank
        until another engine gets the same index.
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
        """Handle a draining engine: send it no further requests."""
        self._candidates = None
        self._told.on_draining(connection, time_left)

    def on_down(self, connection: EngineConnection, end: SessionEnd) -> None:
        """Pass the end of a session to the listener."""
        self._candidates = None
        self._told.on_down(connection, end)

    def on_fate(self, connection: EngineConnection, *, lives: bool) -> None:
        """Tell the listener whether an engine is still alive after a loss in doubt."""
        self._told.on_fate(connection, lives=lives)

    def on_start_wave(self, message: StartWave) -> None:
        """Handle the message of a rank that waits for the other ranks of its group."""
        self._groups.start_wave(message)

    def has_work(self, connection: EngineConnection) -> bool:
        return self._told.has_work(connection)

    @property
    def _told(self) -> ConnectionListener:
        if self._listener is None:
            raise RuntimeError("the pool has no listener; call listen() first")
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
    """Return the fingerprint of the KV blocks that an engine hands over, or empty if it hands no blocks over."""
    gives = ready is not None and KV_TRANSFER in ready.capabilities and ready.kv_address
    return ready.kv_fingerprint if ready is not None and gives else b""
