"""The cluster as the coordinator knows it and frontends see it, whole or by what has changed."""

import enum
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import msgspec

from penstock_common.lora_registry import LoraHeld
from penstock_common.types.data_parallel import GroupRegistration, PoolGroup
from penstock_common.types.kv_transfer import EngineRole

DEFAULT_POOL = "default"
"""Of engines that name no pool."""


class EngineState(enum.IntEnum):
    """What an engine does. Values equal ``penstock.common.v1.EngineState``."""

    LOADING = 1
    SERVING = 2
    DRAINING = 3
    WEDGED = 4
    DEAD = 5


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. ``address`` is host:port; ``seconds_since_last_step`` is 0 while the engine is idle.

    ``max_num_seqs``: requests that it runs at once, 0 where it does not say.
    """

    engine_id: str
    incarnation: str
    address: str
    state: EngineState = EngineState.SERVING
    num_waiting_reqs: int = 0
    num_running_reqs: int = 0
    kv_cache_usage: float = 0.0
    seconds_since_last_step: float = 0.0
    index: int = 0
    model: str = ""
    pool: str = DEFAULT_POOL
    max_num_seqs: int = 0
    loras: LoraHeld | None = None
    """None: it applies no adapters, or has not said which it holds."""
    role: EngineRole = EngineRole.BOTH
    kv_address: str = ""
    """Where others get its blocks; empty: it gives none away."""
    kv_fingerprint: bytes = b""
    """Between engines of one, blocks may move; empty: none of its blocks do."""

    @property
    def load(self) -> float | None:
        """Requests that run and wait, over those that it runs at once; None where it does not say how many these are."""
        return (self.num_running_reqs + self.num_waiting_reqs) / self.max_num_seqs if self.max_num_seqs else None


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """All engines by index, and the data-parallel groups."""

    engines: tuple[EngineStatus, ...] = ()
    groups: tuple[PoolGroup, ...] = ()


class EngineRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine introduces itself. ``incarnation`` changes with every start of the process that is ``engine_id``.

    ``address`` is the host:port under which frontends reach it. ``draining``: it takes no new requests. Engines of one ``pool``
    are scaled together. ``max_num_seqs``: requests that it runs at once, 0 where it does not say. ``group``: set by a rank of a
    data-parallel group. ``kv_address`` and ``kv_fingerprint``: as in ``EngineStatus``.
    """

    engine_id: str
    incarnation: str
    address: str
    model: str
    draining: bool = False
    pool: str = DEFAULT_POOL
    max_num_seqs: int = 0
    group: GroupRegistration | None = None
    role: EngineRole = EngineRole.BOTH
    kv_address: str = ""
    kv_fingerprint: bytes = b""


class DrainCommand(msgspec.Struct, frozen=True):
    """The coordinator wants an engine to take no new requests and to end what it has within ``timeout`` seconds."""

    timeout: float


# Views of the cluster by what has changed in them.


class EngineLoads(msgspec.Struct, frozen=True):
    """The load of engines, field by field. All have the same length."""

    indices: Sequence[int] = ()
    num_waiting_reqs: Sequence[int] = ()
    num_running_reqs: Sequence[int] = ()
    kv_cache_usage: Sequence[float] = ()
    seconds_since_last_step: Sequence[float] = ()

    @classmethod
    def of(cls, engines: Sequence[EngineStatus]) -> Self:
        """The loads of these."""
        names = cls.__struct_fields__[1:]
        return cls([engine.index for engine in engines], *([getattr(each, name) for each in engines] for name in names))


class ViewDelta(msgspec.Struct, frozen=True):
    """What has changed in the engines of a view."""

    removed: Sequence[int] = ()
    """Indices of those that left; they go before others join."""
    changed: Sequence[EngineStatus] = ()
    """Those that joined, and those of which anything but the load has changed."""
    loads: EngineLoads = EngineLoads()
    """Of other engines."""
    loras: Mapping[int, LoraHeld] = msgspec.field(default_factory=dict)
    """By index, the adapters that other engines hold."""

    @property
    def of_members(self) -> bool:
        """Whether more than loads has changed."""
        return bool(self.removed or self.changed)

    @property
    def empty(self) -> bool:
        """Whether nothing has changed."""
        return not (self.removed or self.changed or self.loads.indices or self.loras)


def difference(before: Iterable[EngineStatus], after: Iterable[EngineStatus]) -> ViewDelta:
    """What has changed between the engines of two views. An engine that is the same object in both has not."""
    left = {engine.index: engine for engine in before}
    changed, loaded = [], []
    loras: dict[int, LoraHeld] = {}
    for engine in after:
        old = left.pop(engine.index, None)
        if engine is old:
            continue
        if old is None or _REST(engine) != _REST(old):
            changed.append(engine)
            continue
        if engine.loras is not None and engine.loras != old.loras:
            loras[engine.index] = engine.loras
        if _COUNTS(engine) != _COUNTS(old):
            loaded.append(engine)
    return ViewDelta(removed=sorted(left), changed=changed, loads=EngineLoads.of(loaded), loras=loras)


def changed_by(engines: Iterable[EngineStatus], delta: ViewDelta) -> tuple[EngineStatus, ...]:
    """The engines after the change, by index. Raises ValueError where the change is not one of these engines."""
    by_index = {engine.index: engine for engine in engines}
    for index in delta.removed:
        if by_index.pop(index, None) is None:
            raise ValueError(f"removed has {index}, which is the index of no engine")
    by_index.update((engine.index, engine) for engine in delta.changed)
    fields = EngineLoads.__struct_fields__
    columns = [getattr(delta.loads, name) for name in fields]
    if len({len(column) for column in columns}) > 1:
        lengths = ", ".join(f"{name} {len(column)}" for name, column in zip(fields, columns, strict=True))
        raise ValueError(f"the fields of loads differ in length: {lengths}")
    for index, waiting, running, usage, seconds in zip(*columns, strict=True):
        if (engine := by_index.get(index)) is None:
            raise ValueError(f"loads.indices has {index}, which is the index of no engine")
        by_index[index] = msgspec.structs.replace(
            engine,
            num_waiting_reqs=waiting,
            num_running_reqs=running,
            kv_cache_usage=usage,
            seconds_since_last_step=seconds,
        )
    for index, held in delta.loras.items():
        if (engine := by_index.get(index)) is None:
            raise ValueError(f"loras has {index}, which is the index of no engine")
        by_index[index] = msgspec.structs.replace(engine, loras=held)
    return tuple(engine for _, engine in sorted(by_index.items()))


_LOAD = frozenset(EngineLoads.__struct_fields__)
_REST = operator.attrgetter(*(name for name in EngineStatus.__struct_fields__ if name not in _LOAD | {"loras"}))
_COUNTS = operator.attrgetter(*(name for name in EngineStatus.__struct_fields__ if name in _LOAD))
