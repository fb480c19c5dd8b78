"""Autoscaling signals: how loaded the pools are, which are in use, and how many engines each wants."""

import math
from collections.abc import Iterable, Mapping

import msgspec

from penstock_common.errors import InvalidArgument, Unavailable, nearest, quoted
from penstock_common.types.cluster import ClusterView, EngineStatus
from penstock_coordinator.config import ScalingConfig
from penstock_coordinator.view_channel import Broadcast

# How loaded the engines of each pool are together.


class PoolLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The engines of a pool together, draining ones among them: what they still have is work that somebody has to do."""

    num_engines: int = 0
    load: float | None = 0.0
    """Sum of the engines' loads; None where one of them does not say how many requests it runs at once."""
    kv_cache_usage: float = 0.0
    """Sum of the used fractions of the engines' KV caches."""
    num_reqs: int = 0
    """Requests that run and wait in the engines."""
    num_held_reqs: int = 0
    """Requests that frontends hold. They are for whichever engine comes first, so that every pool counts all of them."""
    slots: float = 0.0
    """Requests that an engine runs at once, on average; 0 without an engine that says so."""

    @property
    def busy(self) -> bool:
        """Whether anything runs, waits or is held."""
        return self.num_reqs > 0 or self.num_held_reqs > 0


def pool_loads(view: ClusterView, num_held_reqs: int, names: Iterable[str]) -> dict[str, PoolLoad]:
    """The load of every pool that is named or has an engine, by name. ``num_held_reqs``: of all frontends."""
    engines: dict[str, list[EngineStatus]] = {name: [] for name in names}
    for engine in view.engines:
        engines.setdefault(engine.pool, []).append(engine)
    return {name: _pool_load(members, num_held_reqs) for name, members in engines.items()}


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


# How many engines a pool wants.

_ROUNDING = 1e-6
"""Of an engine: sums of fractions come out a little above what they stand for."""


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """How loaded the engines of a pool shall be on average."""

    load: float
    """Requests that run and wait, over those that run at once."""
    kv_cache_usage: float
    """Used fraction of the KV cache."""
    slots: int
    """Requests that an engine runs at once, for a pool that has no engine to ask."""


def load_with_held(pool: PoolLoad, targets: Targets) -> float | None:
    """The load of a pool in engines, as if the held requests were in them; None where it is not known."""
    return None if pool.load is None else pool.load + pool.num_held_reqs / (pool.slots or targets.slots)


def wanted_replicas(pool: PoolLoad, targets: Targets) -> int | None:
    """Engines with which a pool is as loaded as it shall be; None where the load is not known.

    However many there are now: engines that start slowly do not make it grow. Autoscalers bound it.
    """
    load = load_with_held(pool, targets)
    if load is None:
        return None
    return math.ceil(max(load / targets.load, pool.kv_cache_usage / targets.kv_cache_usage) - _ROUNDING)


# Which pools are in use, or were a short time ago.


class Activity:
    """Remembers when each pool last had something to do. Times are seconds of one monotonic clock that the caller passes in.

    It forgets with the coordinator: of engines that are there at its first look nobody knows how long they have been idle, so
    that they count as in use until then. A pool without engines and requests does not: it would be woken for nothing.
    """

    def __init__(self) -> None:
        self._busy: dict[str, bool] = {}
        self._busy_at: dict[str, float] = {}

    def take(self, pools: Mapping[str, PoolLoad], now: float) -> bool:
        """Note who has something to do now. Returns whether that, or the pools, have changed."""
        first = not self._busy_at and not self._busy
        busy = {name: pool.busy for name, pool in pools.items()}
        for name, pool in pools.items():
            if pool.busy or self._busy.get(name) or (first and pool.num_engines):
                self._busy_at[name] = now
        changed = busy != self._busy
        self._busy = busy
        return changed

    def active_for(self, pool: str, idle_seconds: float, now: float) -> float:
        """Seconds for which a pool stays in use if nothing comes: infinite while it has something to do, 0 when it is not in use.

        ``idle_seconds``: how long it counts as in use behind its last request.
        """
        if self._busy.get(pool):
            return math.inf
        if pool not in self._busy_at:
            return 0.0
        return max(self._busy_at[pool] + idle_seconds - now, 0.0)


# What autoscalers are told, as soon as it is the truth.


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
