"""What autoscalers are told, as soon as it is the truth."""

from collections.abc import Mapping

from penstock_common.errors import InvalidArgument, Unavailable, nearest, quoted
from penstock_common.types.cluster import ClusterView
from penstock_coordinator.broadcast import Broadcast
from penstock_coordinator.config import ScalingConfig
from penstock_coordinator.scaling.activity import Activity
from penstock_coordinator.scaling.pools import PoolLoad, pool_loads


class ScalingSignals:
    """The pools' load and activity. There is none before the cluster is known: a zero would remove engines that are busy.

    Belongs to one event loop. Times are seconds of one monotonic clock that the caller passes in.
    """

    def __init__(self, config: ScalingConfig) -> None:
        self._config = config
        self._activity = Activity()
        self._pools: dict[str, PoolLoad] = {}
        self._known = False
        self.changes: Broadcast[float] = Broadcast()
        """When a pool began or ceased to have something to do, and when the cluster first was known."""

    @property
    def pools(self) -> Mapping[str, PoolLoad]:
        """The pools by name; none before the cluster is known."""
        return self._pools

    @property
    def known(self) -> bool:
        """Whether the cluster is known."""
        return self._known

    def take(self, view: ClusterView, num_held_reqs: int, now: float) -> None:
        """The cluster is known, and this is how it is now. ``num_held_reqs``: of all frontends."""
        # A pool that was there once stays: it may have gone to zero.
        self._pools = pool_loads(view, num_held_reqs, (*self._config.pools, *self._pools))
        changed = self._activity.take(self._pools, now)
        if changed or not self._known:
            self._known = True
            self.changes.publish(now)

    def pool(self, name: str) -> PoolLoad:
        """The load of a pool. Raises Unavailable while the cluster is not known, InvalidArgument for a pool that there is not."""
        self._check(name)
        return self._pools[name]

    def active_for(self, name: str, idle_seconds: float, now: float) -> float:
        """``Activity.active_for``. Raises as ``pool`` does."""
        self._check(name)
        return self._activity.active_for(name, idle_seconds, now)

    def _check(self, name: str) -> None:
        if not self._known:
            raise Unavailable(
                "the coordinator waits for engines and frontends to come back: it cannot tell how loaded they are",
                reason="CLUSTER_NOT_KNOWN",
                retry_after=1.0,
            )
        if name not in self._pools:
            known = ", ".join(sorted(self._pools)) or "none"
            raise InvalidArgument(
                f"scalerMetadata.pool is {quoted(name)}; pools: {known}{nearest(name, self._pools)}",
                field="scalerMetadata.pool",
            )
