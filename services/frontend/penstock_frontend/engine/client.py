"""The engines as the rest of the frontend sees them: one thing that takes requests."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from penstock_common.errors import DeadlineExceeded, Internal, RequestFailed, ResourceExhausted, Unavailable
from penstock_common.observability.engine_metrics import EngineLoad
from penstock_common.observability.incidents import incident
from penstock_common.observability.logging import get_logger
from penstock_common.types.cluster import ClusterView, EngineState, EngineStatus
from penstock_common.types.outputs import EngineCoreOutputs
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.config import FrontendConfig
from penstock_frontend.engine.base import RankLoad
from penstock_frontend.engine.connection import EngineConnection
from penstock_frontend.engine.dispatch import Dispatch
from penstock_frontend.engine.kv_events import KvEventListener
from penstock_frontend.engine.pool import EnginePool
from penstock_frontend.engine.router import Candidate, Router
from penstock_frontend.engine.variants import Variant, describe, variants_of
from penstock_frontend.ports import ModelLimits, OutputHandler


class GrpcEngineClient:
    """The EngineClient over one session per engine.

    ``on_change`` is called whenever ``usable`` or ``num_held`` may have changed, ``on_moved`` with the number of sequences that
    have left their engines, ``kv_events`` is told how the engines' prefix caches change.
    """

    def __init__(
        self,
        config: FrontendConfig,
        *,
        incarnation: str,
        outputs: OutputHandler,
        on_change: Callable[[], None],
        on_moved: Callable[[int], None],
        kv_events: KvEventListener,
    ) -> None:
        self._kv_events = kv_events
        self._wait_timeout = config.engine_wait_timeout
        self._max_held = config.max_held_requests
        self._num_waiting = 0
        self._tell_change = on_change
        self._pool = EnginePool(config, incarnation=incarnation, listener=self)
        # Frontends start their rotation at different engines.
        self._router = Router(start=hash(incarnation))
        self._dispatch = Dispatch(
            self,
            outputs,
            self._router,
            config.retries,
            hold_timeout=self._wait_timeout,
            on_held=self._on_change,
            on_moved=on_moved,
        )
        self._view = ClusterView()
        self._variants: list[str] = []
        """The variants that there last were; they stay while no engine is connected."""
        self._usable = asyncio.Event()
        self._closed = False

    def follow(self, addresses: Iterable[str]) -> None:
        """Use a fixed list of engines."""
        self._pool.follow(addresses)

    def follow_view(self, view: ClusterView) -> None:
        """Use the engines of a view, and its counts."""
        self._view = view
        self._pool.follow_view(view)
        for status in view.engines:
            self._router.report(
                status.address,
                waiting=status.num_waiting_reqs,
                running=status.num_running_reqs,
                kv_cache_usage=status.kv_cache_usage,
            )
        self._router.keep_only(connection.address for connection in self._pool)
        self._changed()

    @property
    def usable(self) -> bool:
        """See EngineClient."""
        return self._usable.is_set() and not self._closed

    @property
    def limits(self) -> ModelLimits | None:
        """See EngineClient. Engines may have fitted max_model_len to different memories: the smallest counts."""
        ready = [connection.ready for connection in self._pool.connected() if connection.ready is not None]
        if not ready:
            return None
        hidden_sizes = [r.hidden_size for r in ready if r.hidden_size is not None]
        return ModelLimits(
            min(r.max_model_len for r in ready), min(r.vocab_size for r in ready), max(hidden_sizes, default=None)
        )

    @property
    def capabilities(self) -> Sequence[str]:
        """See EngineClient."""
        return sorted({word for c in self._pool.connected() if c.ready for word in c.ready.capabilities})

    @property
    def num_engines(self) -> int:
        """See EngineClient."""
        return sum(candidate.accepting for candidate in self.candidates())

    @property
    def num_held(self) -> int:
        """Requests that wait for an engine: new ones, and sequences that have lost theirs."""
        return self._num_waiting + self._dispatch.num_held

    async def wait_until_usable(self, deadline: float | None = None) -> ModelLimits:
        """See EngineClient."""
        if self._closed or not self._usable.is_set():
            await self._until_usable(deadline)
        if self._closed:
            raise Unavailable("this frontend is shutting down", reason="SHUTTING_DOWN")
        limits = self.limits
        if limits is None:
            raise Internal("an engine is usable and none is connected")
        return limits

    async def _until_usable(self, deadline: float | None) -> None:
        if self._num_waiting >= self._max_held:
            raise ResourceExhausted(
                f"{self._num_waiting} requests wait for an engine; max_held_requests is {self._max_held}",
                retry_after=1.0,
            )
        left = None if deadline is None else deadline - time.time()
        wait = self._wait_timeout if left is None else min(self._wait_timeout, left)
        self._num_waiting += 1
        self._on_change()
        try:
            async with asyncio.timeout(wait):
                while not self._usable.is_set():  # it may have been unset again before this ran
                    await self._usable.wait()
        except TimeoutError:
            if left is not None and left < self._wait_timeout:
                raise DeadlineExceeded("the deadline passed while no engine took requests") from None
            raise Unavailable(f"no engine took requests within {self._wait_timeout:g} s", retry_after=1.0) from None
        finally:
            self._num_waiting -= 1
            self._on_change()

    def add(self, *requests: EngineCoreRequest) -> None:
        """See EngineClient. When the last engine has just gone, they wait for another one."""
        self._dispatch.add(requests)

    def abort(self, request_ids: Iterable[str], reason: str) -> None:
        """See EngineClient."""
        self._dispatch.abort(request_ids, reason)

    async def call_utility(self, method: str, arguments: Sequence[object] = (), *, engine: str = "") -> dict[str, Any]:
        """See EngineClient."""
        engines = [(c.ready.engine_id, c.session) for c in self._pool if c.session and c.ready]
        engines = [(engine_id, session) for engine_id, session in engines if engine in ("", engine_id)]
        calls = [session.call_utility(method, arguments) for _, session in engines]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, RequestFailed):
                raise result
        return {engine_id: result for (engine_id, _), result in zip(engines, results, strict=True)}

    def cluster(self) -> Sequence[EngineStatus]:
        """See EngineClient."""
        known = {c.address: self._status(c) for c in self._pool}
        return [*known.values(), *(status for status in self._view.engines if status.address not in known)]

    def variants(self) -> list[Variant]:
        """See EngineClient."""
        return variants_of(connection.ready for connection in self._pool.connected() if connection.ready is not None)

    def rank_loads(self) -> Sequence[RankLoad]:
        """See EngineClient."""
        connected = [(c.rank, c.ready, c.stats, self._router.load(c.address)) for c in self._pool.connected()]
        loads = [
            RankLoad(
                rank=rank,
                num_running_reqs=load.running,
                num_waiting_reqs=load.waiting,
                kv_cache_usage=load.kv_cache_usage,
                capacity=ready.num_kv_blocks * ready.block_size,
                max_running=ready.max_num_seqs,
                cache_hit_rate=stats.prefix_cache_hit_rate,
            )
            for rank, ready, stats, load in connected
            if rank is not None and ready is not None
        ]
        return sorted(loads, key=lambda load: load.rank)

    def loads(self) -> list[EngineLoad]:
        """What is known of the engines that there is a session with, for the metrics."""
        loads = []
        for connection in self._pool.connected():
            if (ready := connection.ready) is None:
                continue
            load = self._router.load(connection.address)  # newer than the last outputs, where a view came since
            stats = msgspec.structs.replace(
                connection.stats,
                num_waiting_reqs=load.waiting,
                num_running_reqs=load.running,
                kv_cache_usage=load.kv_cache_usage,
            )
            loads.append(
                EngineLoad(
                    model=ready.model,
                    engine=ready.engine_id,
                    num_kv_blocks=ready.num_kv_blocks,
                    block_size=ready.block_size,
                    stats=stats,
                )
            )
        return loads

    def refuse(self) -> None:
        """See EngineClient."""
        self._closed = True
        self._usable.set()

    async def close(self) -> None:
        """End all sessions."""
        self.refuse()
        await self._pool.close()

    # As the pool's ConnectionListener.

    def on_up(self, connection: EngineConnection) -> None:
        """See ConnectionListener."""
        self._router.forget(connection.address)  # counts of an earlier incarnation
        self._tell_variants()
        self._changed()

    def on_outputs(self, connection: EngineConnection, outputs: EngineCoreOutputs) -> None:
        """See ConnectionListener."""
        stats = outputs.scheduler_stats
        if stats is not None:
            before, connection.stats = connection.stats, stats
            if stats.wedged != before.wedged:
                self._changed()
            self._router.report(
                connection.address,
                waiting=stats.num_waiting_reqs,
                running=stats.num_running_reqs,
                kv_cache_usage=stats.kv_cache_usage,
            )
        if outputs.kv_events:
            try:
                self._kv_events.publish(connection.address, connection.rank or 0, outputs.kv_events)
            except Exception as e:  # who only looks on ends no request
                incident(e, request="", doing=f"publishing the cache events of engine {connection.name}")
        if outputs.outputs or outputs.tokens is not None or outputs.finished_requests:
            engine_id = connection.ready.engine_id if connection.ready else ""
            self._dispatch.take(connection.address, engine_id, outputs)

    def on_draining(self, connection: EngineConnection, time_left: float | None) -> None:
        """See ConnectionListener."""
        self._changed()
        if time_left is not None:
            self._dispatch.drain(connection.address, time_left)

    def on_down(self, connection: EngineConnection, reason: str) -> None:
        """See ConnectionListener."""
        self._tell_variants()
        self._changed()
        self._dispatch.lose(connection.address, f"engine {connection.name} is gone: {reason}")
        self._router.forget(connection.address)
        self._kv_events.gone(connection.address)

    def has_work(self, connection: EngineConnection) -> bool:
        """See ConnectionListener."""
        return self._dispatch.num_on(connection.address) > 0

    # As the dispatch's Engines.

    def candidates(self) -> list[Candidate]:
        """See Engines."""
        return [
            Candidate(
                connection.address,
                connection.rank,
                connection.state is EngineState.SERVING,
                connection.ready.config_hash if connection.ready else "",
            )
            for connection in self._pool
        ]

    def send(self, engine: str, request: EngineCoreRequest, *, first: bool) -> None:
        """See Engines."""
        connection = self._pool.get(engine)
        if connection is None or connection.session is None:
            raise Internal(f"the router picked {engine}, which has no session")
        if first:
            connection.heard()  # it has not been silent: there was nothing to say
        connection.session.add(msgspec.structs.replace(request, current_wave=self._view.current_wave))

    def abort_on(self, engine: str, request_ids: Sequence[str], reason: str) -> None:
        """See Engines."""
        connection = self._pool.get(engine)
        if connection is not None and connection.session is not None:
            connection.session.abort(request_ids, reason)

    def _on_change(self) -> None:
        try:
            self._tell_change()
        except Exception as e:  # who only looks on ends no request and no session
            incident(e, request="", doing="reporting a change of the engines")

    def _changed(self) -> None:
        if self._closed:
            return
        if any(candidate.accepting for candidate in self.candidates()):
            self._dispatch.engines_changed()  # those that were there before go first
            self._usable.set()
        else:
            self._usable.clear()
        self._on_change()

    def _tell_variants(self) -> None:
        """Log which variants there are when they are others than before."""
        variants = self.variants()
        hashes = [variant.config_hash for variant in variants]
        if not hashes or hashes == self._variants:
            return
        if len(variants) > 1:
            get_logger().warning("engines of the model compute differently", variants=describe(variants))
        elif len(self._variants) > 1:
            get_logger().info("all engines of the model compute the same", variant=hashes[0])
        self._variants = hashes

    def _status(self, connection: EngineConnection) -> EngineStatus:
        ready, load = connection.ready, self._router.load(connection.address)
        base = connection.status or EngineStatus(engine_id="", incarnation="", address=connection.address)
        if ready is not None:
            base = msgspec.structs.replace(
                base, engine_id=ready.engine_id, incarnation=ready.incarnation, model=ready.model
            )
        return msgspec.structs.replace(
            base,
            state=connection.state,
            index=base.index if connection.rank is None else connection.rank,
            num_waiting_reqs=load.waiting,
            num_running_reqs=load.running,
            kv_cache_usage=load.kv_cache_usage,
        )
