"""Autoscaling signals of each pool: its load, whether it is in use, and the number of engines that it needs."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from penstock_common.errors import InvalidArgument, Unavailable, nearest, quoted
from penstock_common.types.cluster import ClusterView, EngineStatus
from penstock_coordinator.config import ScalingConfig
from penstock_coordinator.view_channel import Broadcast

# The code below computes the total load of the engines of each pool.


class PoolLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a pool, summed over the pool's engines. Draining engines count too, because they still have requests."""

    num_engines: int = 0
    load: float | None = 0.0
    """Sum of the engines' loads. None if an engine does not report how many requests the engine can run at once."""
    kv_cache_usage: float = 0.0
    """Sum of the used fractions of the engines' KV caches."""
    num_reqs: int = 0
    """Number of requests that run or wait on the engines."""
    num_held_reqs: int = 0
    """Number of requests that frontends hold and that the pool may serve. If several pools may serve a request, each of
    them counts it.
    """
    slots: float = 0.0
    """Average number of requests that an engine can run at once, or 0 if no engine reports this number."""

    @property
    def busy(self) -> bool:
        """Whether any request runs or waits on an engine, or is held by a frontend."""
        return self.num_reqs > 0 or self.num_held_reqs > 0


Held = Callable[[str, Collection[str]], int]
"""Function that returns the number of held requests which a pool may serve, for the pool's name and the models of its
engines.
"""


def pool_loads(view: ClusterView, held: Held, names: Iterable[str]) -> dict[str, PoolLoad]:
    """Return the load of every pool in ``names``, and of every other pool with an engine."""
    engines: dict[str, list[EngineStatus]] = {name: [] for name in names}
    for engine in view.engines:
        engines.setdefault(engine.pool, []).append(engine)
    return {
        name: _pool_load(members, held(name, {engine.model for engine in members})) for name, members in engines.items()
    }


def _pool_load(engines: list[EngineStatus], num_held_reqs: int) -> PoolLoad:
    loads = [engine.load for engine in engines]
    known = [load for load in loads if load is not None]
    return PoolLoad(
        num_engines=len(engines),
        load=sum(known) if len(known) == len(loads) else None,
        kv_cache_usage=sum(engine.kv_cache_usage for engine in engines),
        num_reqs=sum(engine.num_running_reqs + engine.num_waiting_reqs for engine in engines),
        num_held_reqs=num_held_reqs,
        slots=sum(engine.max_num_seqs for engine in engines) / len(known) if known else 0.0,
    )


# The code below computes the number of engines that a pool needs.

_ROUNDING = 1e-6
"""Tolerance as a number of engines, because sums of floating-point fractions may be slightly too large."""


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """Target load of a pool, as an average over the pool's engines."""

    load: float
    """Number of requests that run or wait on an engine, divided by the number that the engine can run at once."""
    kv_cache_usage: float
    """Fraction of an engine's KV cache that is in use."""
    slots: int
    """Number of requests that an engine can run at once. This number is used for pools without engines."""


def load_with_held(pool: PoolLoad, targets: Targets) -> float | None:
    """Return the load of a pool as a number of fully loaded engines.

    Held requests count like requests on engines. Return None if the load is unknown.
    """
    return None if pool.load is None else pool.load + pool.num_held_reqs / (pool.slots or targets.slots)


def wanted_replicas(pool: PoolLoad, targets: Targets) -> int | None:
    """Return the number of engines with which the engines of a pool would have their average target load, or None if
    the load is unknown.

    The result does not depend on the current number of engines, so the result does not grow while engines start slowly.
    Autoscalers apply limits to the result.
    """
    load = load_with_held(pool, targets)
    if load is None:
        return None
    return math.ceil(max(load / targets.load, pool.kv_cache_usage / targets.kv_cache_usage) - _ROUNDING)


# The class below tracks which pools are in use, or were in use until recently.


class Activity:
    """Tracks when each pool last had requests. Callers pass the time as seconds of a monotonic clock.

    These times are lost when the coordinator restarts. Pools with engines therefore count as in use at the first
    update, because their idle time is unknown. A pool without engines and requests counts as not in use, because
    scaling it up would have no purpose.
    """

    def __init__(self) -> None:
        self._busy: dict[str, bool] = {}
        self._busy_at: dict[str, float] = {}

    def take(self, pools: Mapping[str, PoolLoad], now: float) -> bool:
        """Record which pools have requests now. Return whether the set of pools with requests, or the set of all pools,
        differs from the previous call.
        """
        first = not self._busy_at and not self._busy
        busy = {name: pool.busy for name, pool in pools.items()}
        for name, pool in pools.items():
            if pool.busy or self._busy.get(name) or (first and pool.num_engines):
                self._busy_at[name] = now
        changed = busy != self._busy
        self._busy = busy
        return changed

    def active_for(self, pool: str, idle_seconds: float, now: float) -> float:
        """Return the number of seconds for which a pool still counts as in use if no request arrives.

        The number is infinite while the pool has requests, and 0 if the pool is not in use. ``idle_seconds`` is the
        time after the pool's last request for which the pool still counts as in use.
        """
        if self._busy.get(pool):
            return math.inf
        if pool not in self._busy_at:
            return 0.0
        return max(self._busy_at[pool] + idle_seconds - now, 0.0)


# The class below publishes the signals for autoscalers as soon as they are known.


class ScalingSignals:
    """Load and activity of the pools.

    The signals are empty until the cluster is known, because autoscalers would remove busy engines if the load were
    zero. This class must be used on one event loop. Callers pass the time as seconds of a monotonic clock.
    """

    def __init__(self, config: ScalingConfig) -> None:
        self._config = config
        self._activity = Activity()
        self._pools: dict[str, PoolLoad] = {}
        self._known = False
        self.changes: Broadcast[float] = Broadcast()
        """Time of the latest change. A change is that a pool gets its first request or ends its last request, or that
        the cluster becomes known.
        """

    @property
    def pools(self) -> Mapping[str, PoolLoad]:
        """Loads of the pools by name, or empty until the cluster is known."""
        return self._pools

    @property
    def known(self) -> bool:
        """Whether ``take`` has been called with the engines of the cluster, so that the signals are not empty."""
        return self._known

    def take(self, view: ClusterView, held: Held, now: float) -> None:
        """Update the signals with the current cluster."""
        # Keep pools that existed before and have no engines now, because they may be scaled to zero.
        self._pools = pool_loads(view, held, (*self._config.pools, *self._pools))
        changed = self._activity.take(self._pools, now)
        if changed or not self._known:
            self._known = True
            self.changes.publish(now)

    def pool(self, name: str) -> PoolLoad:
        """Return the load of a pool.

        Raises Unavailable until the cluster is known, and InvalidArgument for an unknown pool.
        """
        self._check(name)
        return self._pools[name]

    def active_for(self, name: str, idle_seconds: float, now: float) -> float:
        """Return the result of ``Activity.active_for``. Raises the errors of ``pool``."""
        self._check(name)
        return self._activity.active_for(name, idle_seconds, now)

    def _check(self, name: str) -> None:
        if not self._known:
            raise Unavailable(
                "the coordinator is waiting for engines and frontends to reconnect, so the load of the engines "
                "is unknown; try again later",
                reason="CLUSTER_NOT_KNOWN",
                retry_after=1.0,
            )
        if name not in self._pools:
            known = ", ".join(sorted(self._pools)) or "none"
            raise InvalidArgument(
                f"scalerMetadata.pool is {quoted(name)}; existing pools: {known}{nearest(name, self._pools)}",
                field="scalerMetadata.pool",
            )
