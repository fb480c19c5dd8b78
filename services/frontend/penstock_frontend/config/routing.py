"""Which engine a request goes to."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_fields

RoutingPolicy = Literal["prefix_aware", "least_loaded", "round_robin"]


class RoutingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which engine a request goes to that names none."""

    policy: Annotated[
        RoutingPolicy,
        Meta(
            description="prefix_aware: the least loaded engine, less what it has cached of the prompt; least_loaded: whatever is "
            "cached; round_robin: in turn."
        ),
    ] = "prefix_aware"
    max_cached_blocks: Annotated[
        int,
        Meta(
            ge=0,
            le=100_000_000,
            description="Cached blocks that are remembered under prefix_aware, each counted for every engine that has it; up to "
            "250 bytes each.",
        ),
    ] = 2_000_000

    def __post_init__(self) -> None:
        check_fields("routing", self)
