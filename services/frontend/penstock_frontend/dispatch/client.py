"""Engine client of the frontend, which sends requests to engines, handles the engines' events, and remembers lost
engines.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from penstock_common.bounded_queue import TenantRoom
from penstock_common.errors import DeadlineExceeded, Internal, RequestFailed, ResourceExhausted, Unavailable
from penstock_common.observability.logging import get_logger, incident
from penstock_common.security.tls import Certificates
from penstock_common.types.cluster import ClusterView
from penstock_common.types.data_parallel import FirstRequest, StartWave
from penstock_common.types.kv_transfer import KvCacheEvent, of_device
from penstock_common.types.outputs import EngineCoreOutputs
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.config import FrontendConfig
from penstock_frontend.dispatch.connection import EngineConnection
from penstock_frontend.dispatch.disaggregation import Legs, Planned
from penstock_frontend.dispatch.dispatch import Dispatch
from penstock_frontend.dispatch.engine_loads import EngineLoads, describe_variants
from penstock_frontend.dispatch.kv_event_subscriber import CacheFollower
from penstock_frontend.dispatch.kv_events import KvEventFeed
from penstock_frontend.dispatch.pool import EnginePool
from penstock_frontend.dispatch.prefix_caches import PrefixCaches
from penstock_frontend.dispatch.router import Router
from penstock_frontend.interfaces import LossCause, ModelLimits, OutputHandler
from penstock_frontend.rpc.engine_session import SessionEnd
from penstock_frontend.rpc.media_transport import MediaCounts

KEPT_SECONDS = 600.0
"""Seconds for which the loss of an engine is listed, even if the engine has returned."""
MISSING_SECONDS = 86_400.0
"""Maximum number of seconds for which the loss of an engine is listed while the engine is missing."""
MAX_KEPT = 20
"""Maximum number of listed losses. Losses of engines that are not missing are dropped first, then the oldest losses."""
_MAX_LOGGED_REQUESTS = 5
"""Maximum number of moved requests that the log line about a lost engine names."""


class LostEngine(msgspec.Struct, frozen=True):
    """An engine whose session ended although the engine had not announced its stop."""

    engine_id: str
    address: str
    reason: str
    at: float
    """Time at which the engine was lost, in seconds on the clock of ``LostEngines``."""
    num_moved: int
    """Number of this frontend's sequences that resume on other engines because of the loss."""


class LostEngines:
    """Remembers lost engines for ten minutes, and then while they are missing, at most a day.

    A lost engine is missing until an engine with its id or its address connects. Under autoscaling, a new engine has
    another id and another address. Therefore, an engine that was not connected when an engine was lost, and that is no
    missing engine itself, replaces the missing engine that was lost first.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` returns monotonic seconds."""
        self._clock = clock
        self._lost: list[LostEngine] = []
        self._missing: dict[LostEngine, frozenset[str]] = {}
        """Losses of missing engines, the oldest first, each with the ids of the engines that stayed connected."""

    def add(self, engine_id: str, address: str, why: str, num_moved: int, *, connected: Iterable[str] = ()) -> None:
        """Record the loss of an engine, with the current time. ``connected`` are the ids of the other engines."""
        lost = LostEngine(engine_id, address, why, self._clock(), num_moved)
        self._lost.append(lost)
        self._missing[lost] = frozenset(connected)
        if len(self._lost) > MAX_KEPT:
            self._drop(next((each for each in self._lost if each not in self._missing), self._lost[0]))

    def joined(self, engine_id: str, address: str) -> None:
        """Record that an engine has connected: a lost engine has returned, or a new engine replaces a lost engine."""
        ended = [lost for lost in self._missing if engine_id == lost.engine_id or address == lost.address]
        if not ended:
            ended = [lost for lost, connected in self._missing.items() if engine_id not in connected][:1]
        for lost in ended:
            del self._missing[lost]

    def recent(self) -> list[tuple[LostEngine, float]]:
        """Return the losses of engines in the last ten minutes, latest first. Each item has the loss and the seconds
        since the loss.
        """
        now = self._clock()
        for lost in tuple(self._lost):
            if now - lost.at > (MISSING_SECONDS if lost in self._missing else KEPT_SECONDS):
                self._drop(lost)
        return [(lost, now - lost.at) for lost in reversed(self._lost)]

    def missing(self) -> list[str]:
        """Return the ids of the missing engines, the engine that was lost first at the beginning."""
        return [lost.engine_id for lost, _ in reversed(self.recent()) if lost in self._missing]

    def _drop(self, lost: LostEngine) -> None:
        self._lost.remove(lost)
        self._missing.pop(lost, None)


class EngineEvents:
    """Listens to the connections to all engines, and passes each event to the other components in the required order.

    Args:
        dispatch: moves requests between engines.
        router: tracks how many requests each engine has.
        loads: limits, loads and variants of the engines, as the frontend knows them.
        kv_events: the feed that sends KV cache events to external gateways.
        caches: tracks the prefix cache of each engine. None if routing does not use prefix caches.
        lost: records lost engines.
        on_lost: called with the cause of each loss.
        on_change: called whenever an engine may have started or stopped accepting requests.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        router: Router,
        loads: EngineLoads,
        kv_events: KvEventFeed,
        *,
        caches: CacheFollower | None,
        lost: LostEngines,
        on_lost: Callable[[LossCause], None],
        on_change: Callable[[], None],
    ) -> None:
        self._dispatch = dispatch
        self._router = router
        self._loads = loads
        self._kv_events = kv_events
        self._caches = caches
        self._lost = lost
        self._on_lost = on_lost
        self._on_change = on_change
        self._variants: list[str] = []
        """Configuration hashes of the connected engines' variants at the last check. The list stays unchanged while no
        engine is connected.
        """

    def on_up(self, connection: EngineConnection) -> None:
        """Handle an engine whose session is ready.

        Forget the counts of the engine's earlier incarnations, and send held requests to the engine.
        """
        self._router.forget(connection.address)
        self._lost.joined(_id_of(connection), connection.address)
        if self._caches is not None:
            self._caches.up(connection)
        self._tell_variants()
        self._on_change()

    def on_outputs(self, connection: EngineConnection, outputs: EngineCoreOutputs) -> None:
        """Process the outputs of one engine step: first the engine's load, then its cache events, then its outputs.

        Raises EngineFaultError if the engine can no longer be trusted.
        """
        if (stats := outputs.scheduler_stats) is not None:
            was_wedged = connection.stats.wedged
            self._loads.report(connection, stats)
            if stats.wedged != was_wedged:
                self._on_change()
        if outputs.kv_events:
            self._cache_changed(connection, outputs.kv_events)
        if outputs.outputs or outputs.tokens is not None or outputs.finished_requests:
            self._dispatch.take(connection.address, _id_of(connection), outputs)

    def on_draining(self, connection: EngineConnection, time_left: float | None) -> None:
        """Handle a draining engine.

        Requests that the engine cannot finish within ``time_left`` seconds move to other engines.
        """
        self._on_change()
        if time_left is not None:
            self._dispatch.drain(connection.address, time_left)

    def on_down(self, connection: EngineConnection, end: SessionEnd) -> None:
        """Handle the end of a session with an engine.

        Move the engine's requests to other engines, then forget the router's counts for the engine. The move reads
        these counts.
        """
        if self._caches is not None:
            self._caches.down(connection)
        self._tell_variants()
        self._on_change()
        why = f"engine {connection.name} was lost: {end.why}"
        moved = self._dispatch.lose(connection.address, why, in_doubt=not end.by_engine)
        if connection.draining:
            get_logger().info("engine left", engine=connection.name, reason=end.why)
        elif not connection.closing:
            self._tell_loss(connection, end, moved)
        self._router.forget(connection.address)
        self._kv_events.gone(connection.address)

    def _tell_loss(self, connection: EngineConnection, end: SessionEnd, moved: Sequence[str]) -> None:
        """Log, record and count the loss of an engine. ``moved`` has the clients' id of each moved sequence."""
        requests = list(dict.fromkeys(moved))[:_MAX_LOGGED_REQUESTS]
        get_logger().warning(
            "engine lost",
            engine=connection.name,
            reason=end.why,
            moved=len(moved),
            **({"requests": requests} if requests else {}),
        )
        others = self._loads.connected
        self._lost.add(_id_of(connection), connection.address, end.why, len(moved), connected=others)
        self._on_lost(end.cause)

    def on_fate(self, connection: EngineConnection, *, lives: bool) -> None:
        """Handle the outcome of a lost connection to an engine. ``lives`` is True if the engine is alive, and False if
        it has died.
        """
        if lives:
            self._dispatch.acquit(connection.address)
        else:
            self._dispatch.accuse(connection.address)

    def on_start_wave(self, message: StartWave) -> None:
        """Do nothing: the pool has already informed the other ranks of the data-parallel group."""

    def has_work(self, connection: EngineConnection) -> bool:
        return self._dispatch.num_on(connection.address) > 0

    def _cache_changed(self, connection: EngineConnection, events: list[KvCacheEvent]) -> None:
        """Add an engine's cache events to the frontend's own index, and publish them to external gateways.

        External gateways get only events of the KV cache in device memory, and need the tokens of each block. Engines
        that do not report the tokens of blocks are left out.
        """
        if self._caches is not None:
            self._caches.changed(connection, events)
        if connection.ready is None or "kv_events" not in connection.ready.capabilities:
            return
        if not (changes := of_device(events)):
            return
        try:
            self._kv_events.publish(connection.address, connection.rank or 0, changes)
        except Exception as e:  # a failure to publish cache events must not end requests
            incident(e, request="", doing=f"publishing the cache events of engine {connection.name}")

    def _tell_variants(self) -> None:
        """Log the variants of the connected engines if they differ from the variants at the last check."""
        variants = self._loads.variants()
        hashes = [variant.config_hash for variant in variants]
        if not hashes or hashes == self._variants:
            return
        if len(variants) > 1:
            get_logger().warning(
                "engines have different configurations, so their outputs can differ",
                variants=describe_variants(variants),
            )
        elif len(self._variants) > 1:
            get_logger().info("all engines have the same configuration again", variant=hashes[0])
        self._variants = hashes


def _id_of(connection: EngineConnection) -> str:
    return connection.ready.engine_id if connection.ready else ""


_OF_GROUPS = ("pause", "resume")
"""Utility methods that all ranks of a data-parallel group must run together. A rank that joins later gets the current
state of the group.
"""


class GrpcEngineClient:
    """Engine client with one gRPC session per engine. Implements ``EngineClient``.

    Args:
        config: the frontend's settings.
        incarnation: id of this run of the frontend process.
        outputs: receives the outputs of the engines.
        on_change: called whenever ``usable`` or ``num_held`` may have changed.
        on_moved: called with the number of sequences that have left their engine to resume on another engine.
        kv_events: receives the changes of the engines' prefix caches.
        certificates: records when the TLS certificates of the connections expire.
        on_lost: called with the cause of each loss of an engine.
        on_planned: called for each decision whether a request runs on one engine or on two (disaggregated prefill).
        on_gap: called with the time from each planned handoff to the next engine's first output, in seconds.
    """

    def __init__(
        self,
        config: FrontendConfig,
        *,
        incarnation: str,
        outputs: OutputHandler,
        on_change: Callable[[], None],
        on_moved: Callable[[int], None],
        kv_events: KvEventFeed,
        certificates: Certificates,
        on_lost: Callable[[LossCause], None] = lambda _: None,
        on_planned: Planned = lambda *_: None,
        on_gap: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._wait_timeout = config.engine_wait_timeout
        self._max_held = config.max_held_requests
        self.lost = LostEngines(time.monotonic)
        """Engines that this frontend lost in the last ten minutes, and older losses of engines that are still missing."""
        self._waiting = TenantRoom()
        """New requests that wait for an engine."""
        self._tell_change = on_change
        self.on_first_request: Callable[[FirstRequest], None] = lambda _: None
        """Callback that tells the coordinator that this frontend sent a request to an idle data-parallel group."""
        self._pool = EnginePool(
            config,
            incarnation=incarnation,
            certificates=certificates,
            on_first_request=lambda message: self.on_first_request(message),
        )
        routing = config.routing
        # the hash makes different frontends start at different engines
        router = Router(hash(incarnation), routing.policy)
        self.view = EngineLoads(self._pool, router)
        caches = PrefixCaches(routing.max_cached_blocks)
        follower = CacheFollower(caches) if routing.policy == "prefix_aware" else None
        self._dispatch = Dispatch(
            self._pool,
            outputs,
            router,
            config.retries,
            caches=caches,
            hold_timeout=self._wait_timeout,
            on_held=self._on_change,
            on_moved=on_moved,
            legs=Legs(config.disaggregation, router, on_planned),
            on_gap=on_gap,
        )
        self._pool.listen(
            EngineEvents(
                self._dispatch,
                router,
                self.view,
                kv_events,
                caches=follower,
                lost=self.lost,
                on_lost=on_lost,
                on_change=self._engines_changed,
            )
        )
        self._usable = asyncio.Event()
        self._closed = False

    def follow(self, addresses: Iterable[str]) -> None:
        """Connect to a fixed list of engine addresses, instead of the engines in a coordinator's view."""
        self._pool.follow(addresses)

    def follow_view(self, view: ClusterView) -> None:
        """Connect to the engines in a coordinator's view, and use the view's request counts."""
        self._pool.follow_view(view)
        self.view.report_view(view)
        self._engines_changed()

    def coordinator_lost(self) -> None:
        """Handle the loss of the coordinator: no more views arrive from it."""
        self._pool.coordinator_lost()

    @property
    def media_counts(self) -> MediaCounts:
        """Counters of the media items sent to engines."""
        return self._pool.media_counts

    @property
    def usable(self) -> bool:
        """True if at least one engine accepts requests now, and this client is not closed."""
        return self._usable.is_set() and not self._closed

    @property
    def full(self) -> bool:
        """True if a new request would be refused, because ``max_held_requests`` requests already wait for an engine."""
        return not self._usable.is_set() and self._waiting.full(self._max_held)

    @property
    def num_held(self) -> int:
        """Number of requests that wait for an engine. The number includes new requests, and sequences that lost their
        engine.
        """
        return self._waiting.count + self._dispatch.num_held

    async def wait_until_usable(self, deadline: float | None = None, *, tenant: str = "") -> ModelLimits:
        """Wait at most ``engine_wait_timeout`` seconds until an engine accepts requests. Return the limits that every
        engine supports.

        Args:
            deadline: time at which the wait ends, in Unix seconds, or None.
            tenant: tenant of the request. If as many requests wait as ``max_held_requests`` allows, each tenant may
                have an equal share of the waiting requests.

        Raises:
            Unavailable: no engine accepted requests in time, or the frontend is shutting down.
            DeadlineExceeded: the deadline passed.
            ResourceExhausted: ``max_held_requests`` requests wait already, and ``tenant`` has used its share.
        """
        if self._closed or not self._usable.is_set():
            await self._until_usable(deadline, tenant)
        if self._closed:
            raise Unavailable("this frontend is shutting down", reason="SHUTTING_DOWN", retry_after=1.0)
        limits = self.view.limits
        if limits is None:
            raise Internal("the frontend assumed that an engine accepts requests, but no engine is connected")
        return limits

    async def _until_usable(self, deadline: float | None, tenant: str) -> None:
        if not self._max_held or not self._waiting.takes_count(tenant, 1.0, 1, self._max_held):
            raise ResourceExhausted(
                f"{self._waiting.count} requests wait for an engine; the limit max_held_requests is {self._max_held}",
                retry_after=1.0,
            )
        left = None if deadline is None else deadline - time.time()
        wait = self._wait_timeout if left is None else min(self._wait_timeout, left)
        self._waiting.enter(tenant, 1.0)
        self._on_change()
        try:
            async with asyncio.timeout(wait):
                while not self._usable.is_set():
                    # the event ``_usable`` may have been cleared again before this task ran
                    await self._usable.wait()
        except TimeoutError:
            if left is not None and left < self._wait_timeout:
                raise DeadlineExceeded("the request's deadline passed while no engine accepted requests") from None
            raise Unavailable(f"no engine accepted requests within {self._wait_timeout:g} s", retry_after=1.0) from None
        finally:
            self._waiting.leave(tenant)
            self._on_change()

    def add(self, *requests: EngineCoreRequest) -> None:
        """Start the requests of one call, all on the same engine.

        If no engine accepts requests any more, the requests wait for an engine.

        Raises InvalidArgument if the requests name a rank that no engine has.
        """
        self._dispatch.add(requests)

    def abort(self, request_ids: Iterable[str], reason: str) -> None:
        self._dispatch.abort(request_ids, reason)

    async def call_utility(self, method: str, arguments: Sequence[object] = (), *, engine: str = "") -> dict[str, Any]:
        asked = self._pool.computing() if method in _OF_GROUPS and not engine else self._pool.connected()
        engines = [(c.ready.engine_id, c.session) for c in asked if c.session and c.ready]
        engines = [(engine_id, session) for engine_id, session in engines if engine in ("", engine_id)]
        calls = [session.call_utility(method, arguments) for _, session in engines]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, RequestFailed):
                raise result
        return {engine_id: result for (engine_id, _), result in zip(engines, results, strict=True)}

    def refuse(self) -> None:
        self._closed = True
        self._usable.set()

    async def close(self) -> None:
        """End the sessions with all engines."""
        self.refuse()
        await self._pool.close()

    def _engines_changed(self) -> None:
        """Send held requests, and update ``usable``, after an engine may have started or stopped accepting requests."""
        if self._closed:
            return
        if self.view.num_engines:
            self._dispatch.engines_changed()  # send held requests before ``usable`` lets new requests continue
            self._usable.set()
        else:
            self._usable.clear()
        self._on_change()

    def _on_change(self) -> None:
        try:
            self._tell_change()
        except Exception as e:  # an error in the callback must not end requests or sessions
            incident(e, request="", doing="reporting that the engines changed")
