"""What happens to engines, handed to those that it concerns."""

from collections.abc import Callable

from penstock_common.observability.incidents import incident
from penstock_common.observability.logging import get_logger
from penstock_common.types.data_parallel import StartWave
from penstock_common.types.kv_events import KvCacheEvent, of_device
from penstock_common.types.outputs import EngineCoreOutputs
from penstock_frontend.dispatch.connection import EngineConnection
from penstock_frontend.dispatch.dispatch import Dispatch
from penstock_frontend.dispatch.engine_loads import EngineLoads
from penstock_frontend.dispatch.kv_event_subscriber import CacheFollower
from penstock_frontend.dispatch.kv_events import KvEventListener
from penstock_frontend.dispatch.lost_engines import LostEngines
from penstock_frontend.dispatch.router import Router
from penstock_frontend.dispatch.variants import describe
from penstock_frontend.rpc.engine_session import SessionEnd


class EngineEvents:
    """The ConnectionListener of all connections. The order in which dispatch, router and the rest learn of an event matters,
    and stands here alone.

    ``lost``: is told of engines that are lost.
    ``caches``: follows their prefix caches, where requests are routed by them. ``on_change`` is called whenever engines may
    have begun or ceased to take requests.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        router: Router,
        loads: EngineLoads,
        kv_events: KvEventListener,
        *,
        caches: CacheFollower | None,
        lost: LostEngines,
        on_change: Callable[[], None],
    ) -> None:
        self._dispatch = dispatch
        self._router = router
        self._loads = loads
        self._kv_events = kv_events
        self._caches = caches
        self._lost = lost
        self._on_change = on_change
        self._variants: list[str] = []
        """The variants that there last were; they stay while no engine is connected."""

    def on_up(self, connection: EngineConnection) -> None:
        """The engine is ready: counts of an earlier incarnation are forgotten, and held requests may go to it."""
        self._router.forget(connection.address)
        if self._caches is not None:
            self._caches.up(connection)
        self._tell_variants()
        self._on_change()

    def on_outputs(self, connection: EngineConnection, outputs: EngineCoreOutputs) -> None:
        """A step is done: its load, its cache events and then its outputs are taken. Raises EngineFaultError when the engine
        cannot be trusted any more.
        """
        if (stats := outputs.scheduler_stats) is not None:
            was_wedged = connection.stats.wedged
            self._loads.report(connection, stats)
            if stats.wedged != was_wedged:
                self._on_change()
        if outputs.kv_events:
            self._cache_changed(connection, outputs.kv_events)
        if outputs.outputs or outputs.tokens is not None or outputs.finished_requests:
            engine_id = connection.ready.engine_id if connection.ready else ""
            self._dispatch.take(connection.address, engine_id, outputs)

    def on_draining(self, connection: EngineConnection, time_left: float | None) -> None:
        """The engine takes no more requests. What it will not be done with in ``time_left`` seconds goes elsewhere."""
        self._on_change()
        if time_left is not None:
            self._dispatch.drain(connection.address, time_left)

    def on_down(self, connection: EngineConnection, end: SessionEnd) -> None:
        """The session is over: the engine's requests go elsewhere. Only then its counts are forgotten, which tell what else it
        had to do.
        """
        if self._caches is not None:
            self._caches.down(connection)
        self._tell_variants()
        self._on_change()
        why = f"engine {connection.name} is gone: {end.why}"
        moved = self._dispatch.lose(connection.address, why, in_doubt=not end.by_engine)
        if not connection.draining and not connection.closing:
            engine_id = connection.ready.engine_id if connection.ready else ""
            self._lost.add(engine_id, connection.address, end.why, moved)
        self._router.forget(connection.address)
        self._kv_events.gone(connection.address)

    def on_fate(self, connection: EngineConnection, *, lives: bool) -> None:
        """Whether requests can have been what an engine died of is known."""
        if lives:
            self._dispatch.acquit(connection.address)
        else:
            self._dispatch.accuse(connection.address)

    def on_start_wave(self, message: StartWave) -> None:
        """Nobody's concern but the pool's, which has told the other ranks."""

    def has_work(self, connection: EngineConnection) -> bool:
        return self._dispatch.num_on(connection.address) > 0

    def _cache_changed(self, connection: EngineConnection, events: list[KvCacheEvent]) -> None:
        """Routers outside know no media but the KV cache, and look prompts up by tokens, which not every engine tells."""
        if self._caches is not None:
            self._caches.changed(connection, events)
        if connection.ready is None or "kv_events" not in connection.ready.capabilities:
            return
        if not (changes := of_device(events)):
            return
        try:
            self._kv_events.publish(connection.address, connection.rank or 0, changes)
        except Exception as e:  # who only looks on ends no request
            incident(e, request="", doing=f"publishing the cache events of engine {connection.name}")

    def _tell_variants(self) -> None:
        """Log which variants there are when they are others than before."""
        variants = self._loads.variants()
        hashes = [variant.config_hash for variant in variants]
        if not hashes or hashes == self._variants:
            return
        if len(variants) > 1:
            get_logger().warning("engines of the model compute differently", variants=describe(variants))
        elif len(self._variants) > 1:
            get_logger().info("all engines of the model compute the same", variant=hashes[0])
        self._variants = hashes
