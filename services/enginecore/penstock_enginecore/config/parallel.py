"""Data-parallel groups, expert parallelism, and the ports on which the ranks reach each other."""

import ipaddress
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_fields
from penstock_common.errors import ConfigError


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The internal ports, on which workers, nodes, ranks and engines of one deployment reach each other."""

    secret_file: Annotated[
        str,
        Meta(
            description="Path of a file with a secret of 32 to 4096 bytes, by which internal ports recognize each other; the "
            "same secret for all engines and nodes, read once at the start. Empty: none, and internal ports must bind to "
            "loopback addresses or use TLS."
        ),
    ] = ""

    def __post_init__(self) -> None:
        check_fields("parallel", self)


MAX_RANKS = 1024


class DataParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The data-parallel group of engines that compute every step together: all of one pool and model, as their coordinator forms
    it.
    """

    size: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_RANKS,
            description="Ranks that the group begins with; 1: the engine computes alone, which dense models do however many "
            "engines there are.",
        ),
    ] = 1
    min_size: Annotated[
        int,
        Meta(
            ge=1, le=MAX_RANKS, description="Fewest ranks that the group goes on with; with fewer it waits for others."
        ),
    ] = 1
    on_rank_loss: Annotated[
        Literal["shrink", "wait"],
        Meta(
            description="What becomes of a group that has lost a rank: shrink: it goes on without, and takes a replacement in "
            "when there is one; wait: it stands still until there is one."
        ),
    ] = "shrink"
    move_after: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description="Seconds after which requests leave a rank whose group stands still, to go on elsewhere if they can.",
        ),
    ] = 10.0
    address: Annotated[
        str,
        Meta(description="IP address at which the other ranks reach this one; empty: all are on one host, 127.0.0.1."),
    ] = ""
    connect_timeout: Annotated[
        float, Meta(ge=1, le=3600, description="Seconds in which the ranks of a group have to meet.")
    ] = 30.0

    def __post_init__(self) -> None:
        check_fields("data_parallel", self)
        if self.min_size > self.size:
            raise ConfigError(
                f"data_parallel.min_size is {self.min_size}; it must not exceed data_parallel.size = {self.size}"
            )
        if self.address:
            try:
                ipaddress.ip_address(self.address)
            except ValueError:
                raise ConfigError(f"data_parallel.address is {self.address!r}; it must be an IP address") from None

    @property
    def grouped(self) -> bool:
        """Whether the engine is a rank of a group."""
        return self.size > 1


class ExpertParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Experts of a model that is spread over the ranks of a data-parallel group."""

    enabled: Annotated[
        bool,
        Meta(
            description="Share the experts of each layer among the ranks of the data-parallel group; else every rank holds all."
        ),
    ] = False
    slots: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="Experts per layer that a rank has room for, replicas among them; 0: as few as let "
            "data_parallel.min_size ranks hold all.",
        ),
    ] = 0
    window: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="Steps whose tokens are counted before experts are placed anew by them; 0: they stay where they are.",
        ),
    ] = 0
    move_bytes_per_step: Annotated[
        int,
        Meta(
            ge=1,
            description="Bytes of weights that all ranks together exchange after a step, but for a single expert that is larger.",
        ),
    ] = 64 * 1024 * 1024
    dispatch: Annotated[
        str,
        Meta(
            min_length=1,
            description="How tokens come to the ranks of their experts: allgather, alltoall, reduce_scatter, or a plugin's.",
        ),
    ] = "allgather"
    prefill_interval: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="Steps from one to the next in which requests begin, the same on all ranks: steps between are short.",
        ),
    ] = 1

    def __post_init__(self) -> None:
        check_fields("expert_parallel", self)
