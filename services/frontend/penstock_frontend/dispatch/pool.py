"""Connections to all engines, the selection of the engines that this frontend uses, and data-parallel groups."""

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
    """Selects at most ``max_engines`` engines from a coordinator's view.

    Engines that accept requests come first. Among these, the engines with the highest hash of frontend and engine come
    first, so about the same number of frontends use each engine. If an engine joins or leaves, only some frontends
    change their selection, each by one engine (rendezvous hashing, Thaler and Ravishankar 1998).
    """

    def __init__(self, frontend: str, max_engines: int) -> None:
        self._key = hashlib.blake2b(frontend.encode(), digest_size=16).digest()
        self._max_engines = max_engines
        self._weights: dict[str, bytes] = {}

    def of(self, engines: Sequence[EngineStatus]) -> Sequence[EngineStatus]:
        """Return the selected engines. If there are at most ``max_engines`` engines, return all of them."""
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


# The class below tracks which ranks of data-parallel groups accept requests, and to which ranks the frontend must send
# the start of a wave.

Send = Callable[[FirstRequest | StartDpWave], None]


class EngineGroups:
    """Tracks the data-parallel group of each pool as the coordinator reports it, and sends wave messages.

    A rank is identified by its name, which contains engine id and incarnation.
    """

    def __init__(self, send: Send) -> None:
        """Create the tracker. ``send`` sends a ``FirstRequest`` message to the coordinator, or a message that starts a
        wave to a rank.
        """
        self._send = send
        self._waves: dict[tuple[str, str], Waves] = {}
        self._routed: dict[tuple[str, str], frozenset[str]] = {}
        self._pool_of: dict[str, tuple[str, str]] = {}
        """Model and name of the pool of each rank that is a member of a data-parallel group."""

    def follow_view(self, view: ClusterView) -> None:
        """Apply the coordinator's view of the data-parallel groups. Groups with an older epoch or wave than the known
        one are ignored.
        """
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
        """Treat all data-parallel groups as idle while the frontend has no coordinator."""
        self._waves = {key: waves.disconnected()[0] for key, waves in self._waves.items()}

    def accepts(self, rank: str) -> bool:
        """Return True if the frontend may send requests to a rank.

        The rank must be a member of its group, and must not be leaving the group. The group must not be suspended
        because too few ranks are alive. Before the coordinator's first report about groups, every rank counts as
        accepting requests.
        """
        if not self._waves:
            return True
        key = self._pool_of.get(rank)
        return key is not None and rank in self._routed[key]

    def leaves_out(self, rank: str, model: str, pool: str) -> bool:
        """Return True if the pool has a data-parallel group of which this engine is not a member."""
        waves = self._waves.get((model, pool))
        members = () if waves is None else waves.view.group.members
        return bool(members) and rank not in members

    def stamped(self, rank: str, request: EngineCoreRequest) -> EngineCoreRequest:
        """Return a copy of the request that carries the epoch and the wave of the rank's group."""
        view = self._believed(rank).view
        return msgspec.structs.replace(request, group_epoch=view.group.epoch, current_wave=view.wave)

    def sent(self, rank: str) -> None:
        """Handle a request that was sent to a rank of a data-parallel group.

        If the rank's group counts as idle, notify the other ranks and the coordinator.
        """
        if rank in self._pool_of:
            self._tell(self._believed(rank).sent(rank)[1])

    def start_wave(self, message: StartWave) -> None:
        """Handle the message of a rank that waits until the other ranks of its data-parallel group start a wave."""
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
    """Return a copy of the error whose message names the engine."""
    failed = request_failed(error.code, f"engine {engine}: {error.message}", field=error.field, reason=error.reason)
    failed.retry_after = error.retry_after
    return failed


LORA = "lora"
"""Capability that engines report if they can apply LoRA adapters."""
KV_TRANSFER = "kv_transfer"
"""Capability that engines report if they can hand requests over to other engines."""


class EnginePool:
    """Keeps one connection per engine address, and passes the connections' events to the listener.

    If an engine is no longer in the list of engines, its connection stays open until the session breaks. Changes of the
    coordinator's view therefore break no stream. A live engine that this frontend's ``Subset`` does not select gets no
    new requests. The pool closes the connection of such an engine once the engine has no requests of this frontend.
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
            incarnation: id of this run of the frontend process.
            certificates: records when the TLS certificates of these connections expire.
            on_first_request: called when a request was sent to a data-parallel group that counts as idle.

        Raises:
            ConfigError: the TLS settings are not valid.
        """
        self.view = ClusterView()
        """The coordinator's latest view. An empty view if there is no coordinator."""
        self._config = config
        self._credentials = ClientCredentials(config.engine_tls, field="engine_tls", certificates=certificates)
        self._incarnation = incarnation
        self._media = MediaTransport(incarnation)
        self._listener: ConnectionListener | None = None
        self._connections: dict[str, EngineConnection] = {}
        self._candidates: Sequence[Candidate] | None = None
        """Cached result of ``candidates``. None if the list must be rebuilt."""
        self._subset = Subset(config.name, config.coordinator.max_engines)
        self._wanted: frozenset[str] = frozenset()
        self._spare: frozenset[str] = frozenset()
        """Addresses of live engines that this frontend's ``Subset`` does not select."""
        self._closing: set[asyncio.Task[None]] = set()
        self._groups = EngineGroups(self._tell_group)
        self._on_first_request = on_first_request

    def listen(self, listener: ConnectionListener) -> None:
        """Set the listener of connection events. The caller must call this method before the first connection is
        opened.
        """
        self._listener = listener

    def __iter__(self) -> Iterator[EngineConnection]:
        """Iterate over the connections to all engines in a stable order. Connections without a session are included."""
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
        """Start a request on an engine that has a session. Raises Internal if the engine has no session.

        ``first`` is True if no other request of this frontend is on the engine.
        """
        connection = self._connections.get(engine)
        if connection is None or connection.session is None:
            raise Internal(f"the router chose engine {engine}, but the frontend has no session with it")
        if first:
            connection.heard()  # until now, the engine had no work, so its silence before this request does not count
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
        """Handle the loss of the coordinator. Until the frontend has a coordinator again, this pool itself announces
        waves to data-parallel groups.
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
        """Counters of the media items sent to engines."""
        return self._media.counts

    def holding(self, features: Sequence[MultiModalFeature]) -> dict[str, list[MultiModalFeature]]:
        """Return, by engine, the media items in ``features`` that the engine has cached. Leave out engines that have
        cached none of these items.
        """
        held: dict[str, list[MultiModalFeature]] = {}
        for connection in self.connected():
            kept = None if connection.session is None else connection.session.media
            if kept and (found := [feature for feature in features if feature.identifier in kept]):
                held[connection.address] = found
        return held

    def connected(self) -> Sequence[EngineConnection]:
        """Return the engines that currently have a session."""
        return [connection for connection in self if connection.session is not None]

    def computing(self) -> Sequence[EngineConnection]:
        """Return the engines with a session, except engines that wait to become members of a data-parallel group."""
        return [connection for connection in self.connected() if not self._has_no_place(connection)]

    def _has_no_place(self, connection: EngineConnection) -> bool:
        rank, status = connection.group_rank, connection.status
        return rank is not None and status is not None and self._groups.leaves_out(rank, status.model, status.pool)

    def follow(self, addresses: Iterable[str]) -> None:
        """Connect to these addresses. Close the connections to all other addresses when their session has ended.

        An engine's rank is its position in the list, from 0. The frontend cannot use the rank that an engine reports,
        because engines outside a data-parallel group all report the same rank.
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

        A connected engine that is missing in the view has lost its lease, so the frontend probes this engine. The
        engine keeps its rank until the view gives the same index to another engine.
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
        """Handle a draining engine: stop sending requests to the engine."""
        self._candidates = None
        self._told.on_draining(connection, time_left)

    def on_down(self, connection: EngineConnection, end: SessionEnd) -> None:
        """Pass the end of a session on to the listener."""
        self._candidates = None
        self._told.on_down(connection, end)

    def on_fate(self, connection: EngineConnection, *, lives: bool) -> None:
        """Tell the listener whether an engine is still alive after its connection was lost."""
        self._told.on_fate(connection, lives=lives)

    def on_start_wave(self, message: StartWave) -> None:
        """Handle the message of a rank that waits until the other ranks of its data-parallel group start a wave."""
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
        """End the sessions with all engines."""
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
    """Return the fingerprint of the KV blocks that an engine can hand over. Return an empty value if the engine cannot
    hand blocks over.
    """
    gives = ready is not None and KV_TRANSFER in ready.capabilities and ready.kv_address
    return ready.kv_fingerprint if ready is not None and gives else b""
