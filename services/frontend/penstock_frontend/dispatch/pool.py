"""The connections to all engines: the subset this frontend keeps to, data-parallel groups, and what is sent to one."""

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
    """At most ``max_engines`` of a view's engines: those that serve before others, and of these the ones with the highest hashes
    of frontend and engine. So every engine is used by about as many frontends, and one that joins or leaves changes one place of
    some subsets (rendezvous hashing, Thaler and Ravishankar 1998).
    """

    def __init__(self, frontend: str, max_engines: int) -> None:
        self._key = hashlib.blake2b(frontend.encode(), digest_size=16).digest()
        self._max_engines = max_engines
        self._weights: dict[str, bytes] = {}

    def of(self, engines: Sequence[EngineStatus]) -> Sequence[EngineStatus]:
        """The engines to keep to; all, where they are not too many."""
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


# Data-parallel groups: who takes requests, in which wave, and who is told of one.

Send = Callable[[FirstRequest | StartDpWave], None]


class EngineGroups:
    """A belief per pool, as the coordinator tells of its group, and what follows from it. Ranks are known by name."""

    def __init__(self, send: Send) -> None:
        """``send``: takes a first request to the coordinator, and the start of a wave to a rank."""
        self._send = send
        self._waves: dict[tuple[str, str], Waves] = {}
        self._routed: dict[tuple[str, str], frozenset[str]] = {}
        self._pool_of: dict[str, tuple[str, str]] = {}
        """By rank that is a member, the pool."""

    def follow_view(self, view: ClusterView) -> None:
        """What the coordinator says of them. It is never believed to have gone back."""
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
        """There is no coordinator: the groups are believed idle until there is one."""
        self._waves = {key: waves.disconnected()[0] for key, waves in self._waves.items()}

    def accepts(self, rank: str) -> bool:
        """Whether requests may go to a rank: it is in its group, does not leave, and the group does not stand still for want of
        others. Before anybody has told of groups it may.
        """
        if not self._waves:
            return True
        key = self._pool_of.get(rank)
        return key is not None and rank in self._routed[key]

    def leaves_out(self, rank: str, model: str, pool: str) -> bool:
        """Whether the pool has a group in which an engine that could be a rank of it has no place."""
        waves = self._waves.get((model, pool))
        members = () if waves is None else waves.view.group.members
        return bool(members) and rank not in members

    def stamped(self, rank: str, request: EngineCoreRequest) -> EngineCoreRequest:
        """The request as it goes to a rank: with the wave that its group is believed to be in."""
        view = self._believed(rank).view
        return msgspec.structs.replace(request, group_epoch=view.group.epoch, current_wave=view.wave)

    def sent(self, rank: str) -> None:
        """A request went to a rank. Of a group that is believed idle, the other ranks are told, and the coordinator."""
        if rank in self._pool_of:
            self._tell(self._believed(rank).sent(rank)[1])

    def start_wave(self, message: StartWave) -> None:
        """A rank waits for the others."""
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
    """The same error with the engine's name."""
    failed = request_failed(error.code, f"engine {engine}: {error.message}", field=error.field, reason=error.reason)
    failed.retry_after = error.retry_after
    return failed


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
