"""The coordinator's state in one place: members, connected frontends, and the views that frontends are sent."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence

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

# Which frontends are connected and how many requests they hold.


class Frontend(msgspec.Struct):
    """One frontend."""

    session: int
    """Number of its latest stream."""
    num_held_requests: int = 0
    """Requests that wait in it because no engine is up."""


class Frontends:
    """The connected frontends by id. Only the latest stream of a frontend counts; reports on older ones are ignored."""

    def __init__(self) -> None:
        self._frontends: dict[str, Frontend] = {}

    def __len__(self) -> int:
        return len(self._frontends)

    @property
    def num_held_requests(self) -> int:
        """Requests that wait in all frontends because no engine is up."""
        return sum(frontend.num_held_requests for frontend in self._frontends.values())

    def connect(self, session: int, frontend_id: str) -> None:
        """A frontend has sent its hello on a new stream."""
        self._frontends[frontend_id] = Frontend(session)

    def demand(self, session: int, frontend_id: str, num_held_requests: int) -> None:
        """A frontend has reported how many requests it holds."""
        frontend = self._frontends.get(frontend_id)
        if frontend is not None and frontend.session == session:
            frontend.num_held_requests = num_held_requests

    def disconnect(self, session: int, frontend_id: str) -> None:
        """A stream is over."""
        frontend = self._frontends.get(frontend_id)
        if frontend is not None and frontend.session == session:
            del self._frontends[frontend_id]


Clock = Callable[[], float]
PoolKey = tuple[str, str]
"""Model and pool."""


class Cluster:
    """Gives the state machines the time and carries out their effects. Belongs to one event loop."""

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
        """Set when ``tick`` is wanted sooner than ``sleep`` said."""
        self._known_at = now + config.first_view_after
        self._pace = Pace(config.view_interval, config.max_reports_per_second)
        self._views = Views(self._pace, encoder, first_at=self._known_at)
        self._statuses = Statuses()
        self._report_intervals: dict[PoolKey, Broadcast[float]] = {}
        self._sessions = itertools.count(1)
        self._told_groups: tuple[PoolGroup, ...] = ()

    @property
    def known(self) -> bool:
        """Whether engines and frontends that knew a coordinator before this one have had the time to come back."""
        return self.now() >= self._known_at

    @property
    def sleep(self) -> float:
        """Seconds until the next ``tick``."""
        regular = min(self._views.interval, self.lease_seconds / 10)
        waits = self._views.waits(self.now())
        return regular if waits is None else min(waits, regular)

    def new_session(self) -> int:
        """A number that no other stream has."""
        return next(self._sessions)

    def view(self) -> ClusterView:
        """The cluster now."""
        return ClusterView(engines=self._statuses.of(self.membership.members), groups=self._told_groups)

    def group_epoch(self, registration: EngineRegistration) -> int:
        """That of the data-parallel group of an engine's pool; 0 where there is none."""
        group = self.groups.of(registration.model, registration.pool)
        return 0 if group is None else group.machine.group.epoch

    def subscribe(self, subscription: Subscription, *, deltas: bool) -> ViewReader:
        """The views of a frontend's stream, until ``unsubscribe``. ``deltas``: whether the frontend understands them."""
        return self._views.subscribe(subscription, self.view(), self.now(), deltas=deltas)

    def unsubscribe(self, reader: ViewReader) -> None:
        """A frontend's stream is over."""
        self._views.unsubscribe(reader)

    def report_interval(self, pool: PoolKey) -> Broadcast[float]:
        """How often engines of a pool shall report, in seconds, whenever that changes; 0: as they like."""
        if pool not in self._report_intervals:
            self._report_intervals[pool] = Broadcast()
            self._report_intervals[pool].publish(0.0)
        return self._report_intervals[pool]

    def apply(self, effects: Sequence[Effect]) -> None:
        """Log the changes and publish a view. Raises Unavailable or AlreadyExists when the session that caused them must end."""
        for effect in effects:
            if isinstance(effect, SessionEnded):
                raise Unavailable(effect.reason, reason="NOT_A_MEMBER")
            if isinstance(effect, IdTaken):
                get_logger().warning("refused an engine", reason=effect.reason)
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
        """Let leases expire, and publish what is due."""
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
        """Frontends are told soon when there is anything to tell."""
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
"""Changes behind which a pool may have another size."""
