"""The data-parallel group that an engine is a rank of."""

import ipaddress
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_fields
from penstock_common.errors import ConfigError

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
