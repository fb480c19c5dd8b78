"""How loaded the engines of each pool are together."""

from collections.abc import Iterable

import msgspec

from penstock_common.types.cluster import ClusterView, EngineStatus


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
