"""State of the cluster, as the coordinator sends it to frontends: complete views and deltas."""

import enum
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import msgspec

from penstock_common.lora_registry import LoraHeld
from penstock_common.types.data_parallel import GroupRegistration, PoolGroup
from penstock_common.types.kv_transfer import EngineRole

DEFAULT_POOL = "default"
"""Name of the pool of engines whose configuration names no pool."""


class EngineState(enum.IntEnum):
    """State of an engine. Values equal ``penstock.common.v1.EngineState``."""

    LOADING = 1
    SERVING = 2
    DRAINING = 3
    WEDGED = 4
    DEAD = 5


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of an engine. ``address`` is host:port. ``seconds_since_last_step`` is 0 while the engine is idle.

    ``max_num_seqs`` is the maximum number of running requests, or 0 if unknown.
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
    """Adapters in the engine's memory. None if the engine supports no adapters, or has not reported its adapters."""
    role: EngineRole = EngineRole.BOTH
    kv_address: str = ""
    """Address from which other engines fetch this engine's blocks. Empty if the engine does not provide blocks."""
    kv_fingerprint: bytes = b""
    """Fingerprint of the engine's blocks. Engines with equal fingerprints can transfer blocks to each other. Empty if
    the engine cannot transfer blocks.
    """

    @property
    def load(self) -> float | None:
        """Running and waiting requests divided by the maximum number of running requests, or None if the maximum is
        unknown.
        """
        return (self.num_running_reqs + self.num_waiting_reqs) / self.max_num_seqs if self.max_num_seqs else None


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """View of the cluster: all engines by index, and the data-parallel groups."""

    engines: tuple[EngineStatus, ...] = ()
    groups: tuple[PoolGroup, ...] = ()


class EngineRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """Registration of an engine. ``incarnation`` changes with every start of the process with this ``engine_id``.

    Attributes:
        address: host:port at which frontends reach the engine.
        draining: Whether the engine drains, so that it accepts no new requests.
        pool: Name of the engine's pool. Engines of one pool are scaled together.
        max_num_seqs: Maximum number of running requests, or 0 if unknown.
        group: Set by a rank of a data-parallel group.
        kv_address: See ``EngineStatus``.
        kv_fingerprint: See ``EngineStatus``.
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
    """Command of the coordinator to an engine: accept no new requests, and end existing requests within ``timeout``
    seconds.
    """

    timeout: float


# Deltas between views of the cluster.


class EngineLoads(msgspec.Struct, frozen=True):
    """Loads of engines as columns of equal length."""

    indices: Sequence[int] = ()
    num_waiting_reqs: Sequence[int] = ()
    num_running_reqs: Sequence[int] = ()
    kv_cache_usage: Sequence[float] = ()
    seconds_since_last_step: Sequence[float] = ()

    @classmethod
    def of(cls, engines: Sequence[EngineStatus]) -> Self:
        """Return the loads of the given engines as columns."""
        names = cls.__struct_fields__[1:]
        return cls([engine.index for engine in engines], *([getattr(each, name) for each in engines] for name in names))


class ViewDelta(msgspec.Struct, frozen=True):
    """Changes of the engines in a view."""

    removed: Sequence[int] = ()
    """Indices of engines that left. These removals apply before ``changed``."""
    changed: Sequence[EngineStatus] = ()
    """Engines that joined, and engines with a change other than a change of load."""
    loads: EngineLoads = EngineLoads()
    """Loads of engines that are not in ``changed``."""
    loras: Mapping[int, LoraHeld] = msgspec.field(default_factory=dict)
    """Adapters in the memory of engines that are not in ``changed``, by index of the engine."""

    @property
    def of_members(self) -> bool:
        """Whether the delta contains other changes than loads."""
        return bool(self.removed or self.changed)

    @property
    def empty(self) -> bool:
        """Whether the delta contains no change."""
        return not (self.removed or self.changed or self.loads.indices or self.loras)


def difference(before: Iterable[EngineStatus], after: Iterable[EngineStatus]) -> ViewDelta:
    """Return the changes between the engines of two views. An engine whose entry is the same object in both views is
    unchanged.
    """
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
    """Return the engines of the view after the delta is applied, sorted by index. Raises ValueError if the delta does
    not apply to ``engines``.
    """
    by_index = {engine.index: engine for engine in engines}
    for index in delta.removed:
        if by_index.pop(index, None) is None:
            raise ValueError(f"removed has index {index}, but no engine has this index")
    by_index.update((engine.index, engine) for engine in delta.changed)
    fields = EngineLoads.__struct_fields__
    columns = [getattr(delta.loads, name) for name in fields]
    if len({len(column) for column in columns}) > 1:
        lengths = ", ".join(f"{name} {len(column)}" for name, column in zip(fields, columns, strict=True))
        raise ValueError(f"the fields of loads differ in length: {lengths}")
    for index, waiting, running, usage, seconds in zip(*columns, strict=True):
        if (engine := by_index.get(index)) is None:
            raise ValueError(f"loads.indices has index {index}, but no engine has this index")
        by_index[index] = msgspec.structs.replace(
            engine,
            num_waiting_reqs=waiting,
            num_running_reqs=running,
            kv_cache_usage=usage,
            seconds_since_last_step=seconds,
        )
    for index, held in delta.loras.items():
        if (engine := by_index.get(index)) is None:
            raise ValueError(f"loras has index {index}, but no engine has this index")
        by_index[index] = msgspec.structs.replace(engine, loras=held)
    return tuple(engine for _, engine in sorted(by_index.items()))


_LOAD = frozenset(EngineLoads.__struct_fields__)
_REST = operator.attrgetter(*(name for name in EngineStatus.__struct_fields__ if name not in _LOAD | {"loras"}))
_COUNTS = operator.attrgetter(*(name for name in EngineStatus.__struct_fields__ if name in _LOAD))
