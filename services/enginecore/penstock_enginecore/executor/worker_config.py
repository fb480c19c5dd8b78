"""What a worker is told when it is made."""

import msgspec

from penstock_common.config.checks import check_range
from penstock_enginecore.config import EngineCoreConfig


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``engine``: the same for all workers of an engine. ``rank``: which of ``world_size`` workers this one is. Of workers on one
    host each has a device of its own, the one of its rank, and its share of the cores. ``store``: a descriptor of shared memory
    where they find each other; None for a worker that is alone.
    """

    engine: EngineCoreConfig
    rank: int = 0
    world_size: int = 1
    store: int | None = None

    def __post_init__(self) -> None:
        check_range("worker.world_size", self.world_size, low=1)
        check_range("worker.rank", self.rank, low=0, high=self.world_size - 1)
