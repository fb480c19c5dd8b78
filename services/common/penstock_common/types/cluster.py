"""The cluster as the coordinator knows it and frontends see it."""

import enum

import msgspec

from penstock_common.lora.held import LoraHeld
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
