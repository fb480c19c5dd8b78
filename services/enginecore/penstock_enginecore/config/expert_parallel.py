"""Experts that are spread over the ranks of a data-parallel group."""

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_fields


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
