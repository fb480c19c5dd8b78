"""The coordinator's state in one place: members, frontends, and the view that frontends are sent."""

import itertools
from collections.abc import Callable, Sequence

from penstock_common.errors import AlreadyExists, Unavailable
from penstock_common.observability.logging import get_logger
from penstock_common.types.cluster import ClusterView
from penstock_coordinator.broadcast import Broadcast
from penstock_coordinator.config import CoordinatorConfig
from penstock_coordinator.frontends import Frontends
from penstock_coordinator.load import engine_status
from penstock_coordinator.membership import Change, Effect, IdTaken, Membership, SessionEnded
from penstock_coordinator.view import ViewLimiter

Clock = Callable[[], float]


class Cluster:
    """Gives the state machines the time and carries out their effects. Belongs to one event loop."""

    def __init__(self, config: CoordinatorConfig, clock: Clock) -> None:
        now = clock()
        self.lease_seconds = config.lease_seconds
        self.frontends = Frontends()
        self.membership = Membership(lease_seconds=config.lease_seconds, now=now)
        self.views: Broadcast[ClusterView] = Broadcast()
        self.now = clock
        self._known_at = now + config.first_view_after
        self._limiter = ViewLimiter(interval=config.view_interval, first_at=self._known_at)
        self._sessions = itertools.count(1)

    @property
    def known(self) -> bool:
        """Whether engines and frontends that knew a coordinator before this one have had the time to come back."""
        return self.now() >= self._known_at

    def new_session(self) -> int:
        """A number that no other stream has."""
        return next(self._sessions)

    def view(self) -> ClusterView:
        """The cluster now."""
        return ClusterView(engines=tuple(engine_status(member) for member in self.membership.members))

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
        if effects:
            self._publish()

    def tick(self) -> None:
        """Let leases expire, and publish counts that have changed since the last view."""
        self.apply(self.membership.tick(self.now()))
        self._publish()

    def _publish(self) -> None:
        view = self.view()
        if self._limiter.offer(view, self.now()):
            self.views.publish(view)
