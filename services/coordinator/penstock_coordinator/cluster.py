"""State of the coordinator: member engines, connected frontends, and the views that frontends receive."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import msgspec

from penstock_common.errors import AlreadyExists, Unavailable
from penstock_common.observability.logging import get_logger
from penstock_common.types.cluster import ClusterView, EngineRegistration
from penstock_common.types.data_parallel import PoolGroup
from penstock_coordinator.adapters import Adapters
from penstock_coordinator.config import CoordinatorConfig
from penstock_coordinator.groups import Groups
from penstock_coordinator.membership import Change, Effect, IdTaken, MemberChanged, Membership, SessionEnded, Statuses
from penstock_coordinator.view_channel import Broadcast, Encoder, Pace, Subscription, ViewReader, Views

# The classes below track connected frontends, and the number of requests that they hold.


class Frontend(msgspec.Struct):
    """A connected frontend."""

    session: int
    """Number of the frontend's latest stream."""
    serves: Subscription = Subscription()
    """Selection of the engines that may serve the frontend's requests."""
    num_held_requests: int = 0
    """Number of requests that the frontend holds because no engine is ready."""


class Frontends:
    """Connected frontends, by id.

    Only reports on the latest stream of a frontend are used. Reports on older streams are ignored.
    """

    def __init__(self) -> None:
        self._frontends: dict[str, Frontend] = {}

    def __len__(self) -> int:
        return len(self._frontends)

    @property
    def num_held_requests(self) -> int:
        """Number of requests that all frontends together hold because no engine is ready."""
        return sum(frontend.num_held_requests for frontend in self._frontends.values())

    def held_for(self, pool: str, models: Collection[str]) -> int:
        """Return the number of requests that frontends hold and that the engines of a pool may serve.

        ``models`` are the models of the pool's engines. Empty means that the pool has no engines, so its models are not
        known. A frontend with several models has a stream for each model, with that model's pools.
        """
        return sum(each.num_held_requests for each in self._frontends.values() if each.serves.may_use(pool, models))

    def connect(self, session: int, frontend_id: str, serves: Subscription = Subscription()) -> None:  # noqa: B008 - it is immutable
        """Record a frontend that has sent ``hello`` on a new stream, with its selection of engines."""
        self._frontends[frontend_id] = Frontend(session, serves)

    def demand(self, session: int, frontend_id: str, num_held_requests: int) -> None:
        """Record how many requests a frontend holds."""
        frontend = self._frontends.get(frontend_id)
        if frontend is not None and frontend.session == session:
            frontend.num_held_requests = num_held_requests

    def disconnect(self, session: int, frontend_id: str) -> None:
        """Remove a frontend whose stream has ended."""
        frontend = self._frontends.get(frontend_id)
        if frontend is not None and frontend.session == session:
            del self._frontends[frontend_id]


Clock = Callable[[], float]
PoolKey = tuple[str, str]
"""Model name and pool name."""


class Cluster:
    """Passes the current time to the state machines, and applies their effects. Must be used on one event loop."""

    def __init__(self, config: CoordinatorConfig, clock: Clock, encoder: Encoder) -> None:
        now = clock()
        self.lease_seconds = config.lease_seconds
        self.frontends = Frontends()
        self.adapters = Adapters(config.lora, clock)
        self.membership = Membership(lease_seconds=config.lease_seconds, now=now)
        self.now = clock
        self.groups = Groups(
            recovered_at=now + config.lease_seconds, floor=time.time_ns() // 1_000_000, on_change=self._groups_changed
        )
        self.look = asyncio.Event()
        """Event that is set when ``tick`` should run before ``sleep`` seconds have passed."""
        self._known_at = now + config.first_view_after
        self._pace = Pace(config.view_interval, config.max_reports_per_second)
        self._views = Views(self._pace, encoder, first_at=self._known_at)
        self._statuses = Statuses()
        self._report_intervals: dict[PoolKey, Broadcast[float]] = {}
        self._sessions = itertools.count(1)
        self._told_groups: tuple[PoolGroup, ...] = ()

    @property
    def known(self) -> bool:
        """Whether the engines and frontends of an earlier coordinator have had enough time to reconnect."""
        return self.now() >= self._known_at

    @property
    def sleep(self) -> float:
        """Seconds to wait until the next ``tick``."""
        regular = min(self._views.interval, self.lease_seconds / 10)
        waits = self._views.waits(self.now())
        return regular if waits is None else min(waits, regular)

    def new_session(self) -> int:
        """Return a number for a new stream that no other stream has."""
        return next(self._sessions)

    def view(self) -> ClusterView:
        """Return the current view of the cluster."""
        return ClusterView(engines=self._statuses.of(self.membership.members), groups=self._told_groups)

    def group_epoch(self, registration: EngineRegistration) -> int:
        """Return the epoch of the data-parallel group of an engine's pool, or 0 if the pool has no group."""
        group = self.groups.of(registration.model, registration.pool)
        return 0 if group is None else group.machine.group.epoch

    def subscribe(self, subscription: Subscription, *, deltas: bool) -> ViewReader:
        """Subscribe a frontend's stream to views. End the subscription with ``unsubscribe``.

        ``deltas`` is True if the frontend supports deltas.
        """
        return self._views.subscribe(subscription, self.view(), self.now(), deltas=deltas)

    def unsubscribe(self, reader: ViewReader) -> None:
        """End the subscription of a frontend's stream."""
        self._views.unsubscribe(reader)

    def report_interval(self, pool: PoolKey) -> Broadcast[float]:
        """Return the report interval of a pool's engines in seconds, including later changes of the interval. 0 means
        that each engine chooses its interval.
        """
        if pool not in self._report_intervals:
            self._report_intervals[pool] = Broadcast()
            self._report_intervals[pool].publish(0.0)
        return self._report_intervals[pool]

    def apply(self, effects: Sequence[Effect]) -> None:
        """Apply effects: log the changes, and publish a view.

        Raises Unavailable or AlreadyExists if the session that caused the effects must end.
        """
        for effect in effects:
            if isinstance(effect, SessionEnded):
                raise Unavailable(effect.reason, reason="NOT_A_MEMBER")
            if isinstance(effect, IdTaken):
                get_logger().warning("refused the registration of an engine", reason=effect.reason)
                raise AlreadyExists(effect.reason, field="register.engine_id", reason="ENGINE_ID_TAKEN")
            log = get_logger().warning if effect.change is Change.EXPIRED else get_logger().info
            log(f"engine {effect.change.value}", engine=effect.engine_id, index=effect.index)
            self._lose_rank(effect)
        if effects:
            now = self.now()
            self._views.members_changed(now)
            self._views.offer(self.view, now)
            if self._views.waits(now) is not None:
                self.look.set()
        if any(isinstance(effect, MemberChanged) and effect.change in _OF_SIZE for effect in effects):
            self._tell_report_intervals()

    def tick(self) -> None:
        """Expire leases, and publish views that are due."""
        self.look.clear()
        self.apply(self.membership.tick(self.now()))
        self.groups.tick(self.now())
        self.adapters.tick()
        self._views.offer(self.view, self.now())

    def _lose_rank(self, effect: MemberChanged) -> None:
        if effect.change in (Change.LEFT, Change.EXPIRED, Change.WEDGED):
            self.groups.gone(effect.engine_id, self.now())
        if effect.change in (Change.LEFT, Change.EXPIRED):
            self.groups.forget(effect.engine_id)

    def _groups_changed(self) -> None:
        """If the groups have changed, schedule a view for frontends soon."""
        groups = self.groups.views()
        if groups != self._told_groups:
            self._told_groups = groups
            self._views.members_changed(self.now())
            self.look.set()

    def _tell_report_intervals(self) -> None:
        sizes = Counter(self.membership.pools())
        for pool in self._report_intervals.keys() - sizes.keys():
            del self._report_intervals[pool]
        for pool, size in sizes.items():
            told, interval = self.report_interval(pool), self._pace.of_reports(size)
            if told.newest != interval:
                told.publish(interval)


_OF_SIZE = (Change.JOINED, Change.REPLACED, Change.RECONNECTED, Change.LEFT, Change.EXPIRED)
"""Changes of members after which a pool may have another number of engines."""
