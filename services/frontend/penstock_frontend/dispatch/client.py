"""The engines as the rest of the frontend uses them: one thing that takes requests."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from penstock_common.errors import DeadlineExceeded, Internal, RequestFailed, ResourceExhausted, Unavailable
from penstock_common.observability.incidents import incident
from penstock_common.security.certificates import Certificates
from penstock_common.tenant_room import TenantRoom
from penstock_common.types.cluster import ClusterView
from penstock_common.types.data_parallel import FirstRequest
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.config import FrontendConfig
from penstock_frontend.dispatch.disaggregation import Legs, Planned
from penstock_frontend.dispatch.dispatch import Dispatch
from penstock_frontend.dispatch.engine_loads import EngineLoads
from penstock_frontend.dispatch.events import EngineEvents
from penstock_frontend.dispatch.kv_event_subscriber import CacheFollower
from penstock_frontend.dispatch.kv_events import KvEventListener
from penstock_frontend.dispatch.lost_engines import LostEngines
from penstock_frontend.dispatch.pool import EnginePool
from penstock_frontend.dispatch.prefix_caches import PrefixCaches
from penstock_frontend.dispatch.router import Router
from penstock_frontend.ports import ModelLimits, OutputHandler
from penstock_frontend.rpc.media_transport import MediaCounts

_OF_GROUPS = ("pause", "resume")
"""Methods that ranks of a data-parallel group carry out together; who gets a place in it is told of them then."""


class GrpcEngineClient:
    """The EngineClient over one session per engine.

    ``on_change`` is called whenever ``usable`` or ``num_held`` may have changed, ``on_moved`` with the number of sequences that
    have left their engines, ``kv_events`` is told how the engines' prefix caches change, ``certificates`` when those of the
    connections end. ``on_planned`` is called with each plan of legs, ``on_gap`` with the seconds of each handoff.
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
        certificates: Certificates,
        on_planned: Planned = lambda *_: None,
        on_gap: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._wait_timeout = config.engine_wait_timeout
        self._max_held = config.max_held_requests
        self.lost = LostEngines(time.monotonic)
        """The engines that were lost lately."""
        self._waiting = TenantRoom()
        """New requests that wait for an engine."""
        self._tell_change = on_change
        self.on_first_request: Callable[[FirstRequest], None] = lambda _: None
        """Tells the coordinator that a request went to an idle data-parallel group."""
        self._pool = EnginePool(
            config,
            incarnation=incarnation,
            certificates=certificates,
            on_first_request=lambda message: self.on_first_request(message),
        )
        routing = config.routing
        router = Router(hash(incarnation), routing.policy)  # frontends start their rotation at different engines
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
                on_change=self._engines_changed,
            )
        )
        self._usable = asyncio.Event()
        self._closed = False

    def follow(self, addresses: Iterable[str]) -> None:
        """Use a fixed list of engines."""
        self._pool.follow(addresses)

    def follow_view(self, view: ClusterView) -> None:
        """Use the engines of a coordinator's view, and its counts of their requests."""
        self._pool.follow_view(view)
        self.view.report_view(view)
        self._engines_changed()

    def coordinator_lost(self) -> None:
        """No views come in any more."""
        self._pool.coordinator_lost()

    @property
    def media_counts(self) -> MediaCounts:
        """What has been sent of media."""
        return self._pool.media_counts

    @property
    def usable(self) -> bool:
        """Whether an engine takes requests now, and this client does."""
        return self._usable.is_set() and not self._closed

    @property
    def full(self) -> bool:
        """Whether a new request would be refused, because as many as may wait for an engine do."""
        return not self._usable.is_set() and self._waiting.full(self._max_held)

    @property
    def num_held(self) -> int:
        """Requests that wait for an engine: new ones, and sequences that have lost theirs."""
        return self._waiting.count + self._dispatch.num_held

    async def wait_until_usable(self, deadline: float | None = None, *, tenant: str = "") -> ModelLimits:
        """Wait for an engine, ``engine_wait_timeout`` seconds and until ``deadline`` (Unix seconds) at most. Returns what all of
        them can take.

        Raises Unavailable, DeadlineExceeded, and ResourceExhausted where ``max_held_requests`` wait already and ``tenant`` has
        its share of them. All tenants have the same share.
        """
        if self._closed or not self._usable.is_set():
            await self._until_usable(deadline, tenant)
        if self._closed:
            raise Unavailable("this frontend is shutting down", reason="SHUTTING_DOWN", retry_after=1.0)
        limits = self.view.limits
        if limits is None:
            raise Internal("an engine is usable and none is connected")
        return limits

    async def _until_usable(self, deadline: float | None, tenant: str) -> None:
        if not self._max_held or not self._waiting.takes_count(tenant, 1.0, 1, self._max_held):
            raise ResourceExhausted(
                f"{self._waiting.count} requests wait for an engine; max_held_requests is {self._max_held}",
                retry_after=1.0,
            )
        left = None if deadline is None else deadline - time.time()
        wait = self._wait_timeout if left is None else min(self._wait_timeout, left)
        self._waiting.enter(tenant, 1.0)
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
            self._waiting.leave(tenant)
            self._on_change()

    def add(self, *requests: EngineCoreRequest) -> None:
        """Start requests that belong together on one engine; when the last engine has just gone, they wait for another one.
        Raises InvalidArgument when they name an engine that is not there.
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
        """End all sessions."""
        self.refuse()
        await self._pool.close()

    def _engines_changed(self) -> None:
        """Engines may have begun or ceased to take requests."""
        if self._closed:
            return
        if self.view.num_engines:
            self._dispatch.engines_changed()  # requests that were there before go first
            self._usable.set()
        else:
            self._usable.clear()
        self._on_change()

    def _on_change(self) -> None:
        try:
            self._tell_change()
        except Exception as e:  # who only looks on ends no request and no session
            incident(e, request="", doing="reporting a change of the engines")
