"""How many engines a pool wants."""

import math

import msgspec

from penstock_coordinator.scaling.pools import PoolLoad

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
