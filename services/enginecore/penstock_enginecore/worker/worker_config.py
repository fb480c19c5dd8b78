"""What a worker is told when it is made."""

import msgspec

from penstock_common.config.checks import check_range
from penstock_enginecore.config import EngineCoreConfig


class Node(msgspec.Struct, frozen=True):
    """One of the hosts of an engine's workers: those from ``first_rank`` on. ``meeting``: host:port at which workers of all nodes
    find each other. ``address``: the IP address at which others reach those of this one.
    """

    first_rank: int
    num_workers: int
    meeting: str
    address: str


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``engine``: the same for all workers of an engine. ``rank``: which of ``world_size`` workers this one is: those of a stage
    come one after the other, the stages behind one another. ``node``: where it runs, None for an engine that has one node. Of
    workers on one node each has a device of its own, the one of its place, and its share of the cores. ``store``: a descriptor
    of memory that the workers of the node share, where they find each other; None for a worker that is alone. ``exchange``: a
    descriptor of the memory in which the workers of a stage exchange what they computed; None where that goes over gloo.
    """

    engine: EngineCoreConfig
    rank: int = 0
    world_size: int = 1
    node: Node | None = None
    store: int | None = None
    exchange: int | None = None

    def __post_init__(self) -> None:
        check_range("worker.world_size", self.world_size, low=1)
        check_range("worker.rank", self.rank, low=0, high=self.world_size - 1)

    @property
    def place(self) -> int:
        """Which of the node's workers this one is."""
        return self.rank - self.node.first_rank if self.node else self.rank

    @property
    def num_neighbours(self) -> int:
        """Workers of the node, this one among them."""
        return self.node.num_workers if self.node else self.world_size

    @property
    def stage(self) -> int:
        """Which stage of the pipeline the worker belongs to."""
        return self.rank // self.engine.executor.tensor_parallel_size

    @property
    def tensor_rank(self) -> int:
        """Which part of its stage's layers the worker has."""
        return self.rank % self.engine.executor.tensor_parallel_size

    @property
    def samples(self) -> bool:
        """Whether the worker is of the last stage."""
        return self.stage == self.engine.executor.pipeline_parallel_size - 1

    @property
    def tells_tokens(self) -> bool:
        """Whether the engine gets its tokens from this worker, the first of the last stage."""
        return self.samples and self.tensor_rank == 0
