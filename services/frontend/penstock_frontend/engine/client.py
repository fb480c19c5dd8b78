"""The engines as the rest of the frontend sees them: one thing that takes requests."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from penstock_common.engine_metrics import EngineLoad
from penstock_common.errors import DeadlineExceeded, Internal, RequestFailed, Unavailable
from penstock_common.rpc.credentials import NO_TLS, ClientCredentials
from penstock_common.types.cluster import ClusterView, EngineState, EngineStatus
from penstock_common.types.outputs import EngineCoreOutput, EngineCoreOutputs
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.engine.connection import EngineConnection
from penstock_frontend.engine.kv_events import KvEventListener
from penstock_frontend.engine.pool import EnginePool
from penstock_frontend.engine.router import Candidate, Router
from penstock_frontend.processing.input import ModelLimits
from penstock_frontend.rpc.engine_session import EngineSession


class OutputHandler(Protocol):
    """Who gets what engines produce."""

    def process(self, outputs: Sequence[EngineCoreOutput], engine: str, timestamp: float) -> Sequence[str]:
        """Take a step's outputs; returns the ids of requests that the engine need not go on with.

        ``engine``: the engine's id; ``timestamp``: when the step ended, on the engine's clock.
        """

    def fail(self, request_ids: Iterable[str], error: RequestFailed) -> None:
        """End these requests."""

    def fail_engine(self, engine: str, error: RequestFailed) -> None:
        """End every request of an engine."""


class RankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a connected engine has to do. ``rank``: no two engines have the same; ``capacity``: tokens its KV cache holds."""

    rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float
    capacity: int


class EngineClient(Protocol):
    """Takes requests to engines. Outputs come through an OutputHandler."""

    @property
    def usable(self) -> bool:
        """Whether an engine takes requests now."""

    @property
    def limits(self) -> ModelLimits | None:
        """What every connected engine can take; None while there is none."""

    @property
    def capabilities(self) -> Sequence[str]:
        """What at least one connected engine serves."""

    @property
    def num_engines(self) -> int:
        """Engines that take requests now."""

    async def wait_until_usable(self, deadline: float | None = None) -> ModelLimits:
        """Wait for an engine, until ``deadline`` (Unix seconds) at most. Raises Unavailable or DeadlineExceeded."""

    def add(self, *requests: EngineCoreRequest) -> str:
        """Start requests that belong together on one engine. Returns its key. Raises Unavailable when none takes them."""

    def abort(self, engine: str, request_ids: Sequence[str], reason: str) -> None:
        """End requests of an engine; nothing more comes of them."""

    async def call_utility(self, method: str, arguments: Sequence[object] = ()) -> dict[str, Any]:
        """Call a registered method on every connected engine. Results, or the RequestFailed it ended with, by engine id."""

    def refuse(self) -> None:
        """Take no more requests; those that wait for an engine fail."""

    def cluster(self) -> Sequence[EngineStatus]:
        """The engines as this frontend sees them."""

    def rank_loads(self) -> Sequence[RankLoad]:
        """The load of every connected engine, by rank."""


class GrpcEngineClient:
    """The EngineClient over one session per engine.

    ``on_change`` is called whenever ``usable`` may have changed, ``kv_events`` is told how the engines' prefix caches change.
    """

    def __init__(
        self,
        *,
        model: str,
        frontend_id: str,
        incarnation: str,
        outputs: OutputHandler,
        wait_timeout: float,
        on_change: Callable[[], None],
        kv_events: KvEventListener,
        credentials: ClientCredentials = NO_TLS,
    ) -> None:
        self._outputs = outputs
        self._kv_events = kv_events
        self._wait_timeout = wait_timeout
        self._on_change = on_change
        self._pool = EnginePool(
            model=model, frontend_id=frontend_id, incarnation=incarnation, listener=self, credentials=credentials
        )
        # Frontends start their rotation at different engines.
        self._router = Router(start=hash(incarnation))
        self._view = ClusterView()
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
        return ModelLimits(min(r.max_model_len for r in ready), min(r.vocab_size for r in ready))

    @property
    def capabilities(self) -> Sequence[str]:
        """See EngineClient."""
        return sorted({word for c in self._pool.connected() if c.ready for word in c.ready.capabilities})

    @property
    def num_engines(self) -> int:
        """See EngineClient."""
        return sum(candidate.accepting for candidate in self._candidates())

    async def wait_until_usable(self, deadline: float | None = None) -> ModelLimits:
        """See EngineClient."""
        left = None if deadline is None else deadline - time.time()
        wait = self._wait_timeout if left is None else min(self._wait_timeout, left)
        try:
            async with asyncio.timeout(wait):
                while True:
                    await self._usable.wait()
                    if self._closed:
                        raise Unavailable("this frontend is shutting down", reason="SHUTTING_DOWN")
                    if (limits := self.limits) is not None:
                        return limits
        except TimeoutError:
            if left is not None and left < self._wait_timeout:
                raise DeadlineExceeded("the deadline passed while no engine took requests") from None
            raise Unavailable(f"no engine took requests within {self._wait_timeout:g} s", retry_after=1.0) from None

    def add(self, *requests: EngineCoreRequest) -> str:
        """See EngineClient."""
        key = self._router.pick(self._candidates(), rank=requests[0].data_parallel_rank, count=len(requests))
        session = self._session(key)
        if session is None:
            raise Internal(f"the router picked {key}, which has no session")
        for request in requests:
            # The choice of the rank is made: for the engine there is none.
            session.add(msgspec.structs.replace(request, data_parallel_rank=None, current_wave=self._view.current_wave))
        return key

    def abort(self, engine: str, request_ids: Sequence[str], reason: str) -> None:
        """See EngineClient."""
        if (session := self._session(engine)) is not None:
            session.abort(request_ids, reason)

    async def call_utility(self, method: str, arguments: Sequence[object] = ()) -> dict[str, Any]:
        """See EngineClient."""
        engines = [(c.ready.engine_id, c.session) for c in self._pool if c.session and c.ready]
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

    def rank_loads(self) -> Sequence[RankLoad]:
        """See EngineClient. Engines that call themselves the same rank are numbered by their addresses instead."""
        connected = [(c, c.ready, self._router.load(c.address)) for c in self._pool.connected() if c.ready is not None]
        distinct = len({c.rank for c, _, _ in connected}) == len(connected)
        loads = [
            RankLoad(
                rank=connection.rank if distinct else position,
                num_running_reqs=load.running,
                num_waiting_reqs=load.waiting,
                kv_cache_usage=load.kv_cache_usage,
                capacity=ready.num_kv_blocks * ready.block_size,
            )
            for position, (connection, ready, load) in enumerate(connected)
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

    def on_up(self, connection: EngineConnection) -> None:
        """See ConnectionListener."""
        self._router.forget(connection.address)  # counts of an earlier incarnation
        self._changed()

    def on_outputs(self, connection: EngineConnection, outputs: EngineCoreOutputs) -> None:
        """See ConnectionListener."""
        stats = outputs.scheduler_stats
        if stats is not None:
            connection.stats = stats
            self._router.report(
                connection.address,
                waiting=stats.num_waiting_reqs,
                running=stats.num_running_reqs,
                kv_cache_usage=stats.kv_cache_usage,
            )
        if outputs.kv_events:
            self._kv_events.publish(connection.address, connection.rank, outputs.kv_events)
        if outputs.outputs:
            engine_id = connection.ready.engine_id if connection.ready else ""
            not_needed = self._outputs.process(outputs.outputs, engine_id, outputs.timestamp)
            if not_needed:
                self.abort(connection.address, not_needed, "a stop string ended the output")
        if outputs.finished_requests:
            self._outputs.fail(
                outputs.finished_requests,
                Unavailable(f"engine {connection.name} ended the request", reason="ENGINE_ERROR"),
            )

    def on_draining(self, connection: EngineConnection) -> None:
        """See ConnectionListener."""
        del connection
        self._changed()

    def on_down(self, connection: EngineConnection, reason: str) -> None:
        """See ConnectionListener."""
        self._router.forget(connection.address)
        error = Unavailable(f"engine {connection.name} is gone: {reason}", reason="ENGINE_GONE", retry_after=1.0)
        self._outputs.fail_engine(connection.address, error)
        self._kv_events.gone(connection.address)
        self._changed()

    def _session(self, key: str) -> EngineSession | None:
        connection = self._pool.get(key)
        return connection.session if connection is not None else None

    def _candidates(self) -> list[Candidate]:
        return [
            Candidate(connection.address, connection.rank, connection.state is EngineState.SERVING)
            for connection in self._pool.connected()
        ]

    def _changed(self) -> None:
        if self._closed:
            return
        if any(candidate.accepting for candidate in self._candidates()):
            self._usable.set()
        else:
            self._usable.clear()
        self._on_change()

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
            index=connection.rank,
            num_waiting_reqs=load.waiting,
            num_running_reqs=load.running,
            kv_cache_usage=load.kv_cache_usage,
        )
