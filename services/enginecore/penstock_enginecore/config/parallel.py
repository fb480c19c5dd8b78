"""Settings of data-parallel groups, of expert parallelism, and of the internal ports between ranks."""

import ipaddress
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_fields
from penstock_common.errors import ConfigError


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The internal ports between workers, nodes, ranks and engines of one deployment."""

    secret_file: Annotated[
        str,
        Meta(
            description=(
                "Path of a file with a secret of 32 to 4096 bytes, which authenticates connections to internal "
                "ports. All engines and nodes need the same secret, and read it once at start. Empty: no secret; "
                "internal ports must then bind to loopback addresses or use TLS."
            )
        ),
    ] = ""

    def __post_init__(self) -> None:
        check_fields("parallel", self)


MAX_RANKS = 1024


class DataParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The data-parallel group: engines of one pool and model that run every step together. The coordinator forms the
    group.
    """

    size: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_RANKS,
            description=(
                "Number of ranks with which the group starts. 1: no group. Dense models need no group, regardless of "
                "the number of engines."
            ),
        ),
    ] = 1
    min_size: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_RANKS,
            description=(
                "Minimum number of ranks with which the group runs. With fewer ranks, the group waits for more ranks."
            ),
        ),
    ] = 1
    on_rank_loss: Annotated[
        Literal["shrink", "wait"],
        Meta(
            description=(
                "Reaction to the loss of a rank. shrink: the group continues without the rank, and adds a "
                "replacement when one joins. wait: the group stops until a replacement joins."
            )
        ),
    ] = "shrink"
    move_after: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description=(
                "Seconds after which requests leave a rank whose group has stopped. The requests resume on another "
                "engine if possible."
            ),
        ),
    ] = 10.0
    address: Annotated[
        str,
        Meta(
            description=(
                "IP address at which the other ranks reach this rank. Empty: 127.0.0.1, for ranks on one host."
            )
        ),
    ] = ""
    connect_timeout: Annotated[
        float, Meta(ge=1, le=3600, description="Seconds within which the ranks of a group must connect to each other.")
    ] = 30.0

    def __post_init__(self) -> None:
        check_fields("data_parallel", self)
        if self.min_size > self.size:
            raise ConfigError(
                f"data_parallel.min_size is {self.min_size}; it must be at most data_parallel.size, which is {self.size}"
            )
        if self.address:
            try:
                ipaddress.ip_address(self.address)
            except ValueError:
                raise ConfigError(f"data_parallel.address is {self.address!r}; it must be an IP address") from None

    @property
    def grouped(self) -> bool:
        """Whether the engine is in a data-parallel group."""
        return self.size > 1


class ExpertParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Distribution of a model's experts over the ranks of a data-parallel group."""

    enabled: Annotated[
        bool,
        Meta(
            description=(
                "Split the experts of each layer among the ranks of the data-parallel group. false: every rank stores "
                "all experts."
            )
        ),
    ] = False
    slots: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description=(
                "Expert slots per layer and rank, including replicas. 0: the smallest number with which "
                "data_parallel.min_size ranks can store every expert."
            ),
        ),
    ] = 0
    window: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description=(
                "Number of steps in which the engine counts the tokens of each expert. After these steps, the engine "
                "moves experts to balance the load. 0: experts are never moved."
            ),
        ),
    ] = 0
    move_bytes_per_step: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "Maximum bytes of expert weights that all ranks together exchange after a step. At least one expert is "
                "exchanged, even if it is larger."
            ),
        ),
    ] = 64 * 1024 * 1024
    dispatch: Annotated[
        str,
        Meta(
            min_length=1,
            description=(
                "Method that sends tokens to the ranks of their experts: allgather, alltoall, reduce_scatter, or a "
                "method of a plugin."
            ),
        ),
    ] = "allgather"
    prefill_interval: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description=(
                "Interval, in steps, between steps in which new requests may start. The interval is the same on all "
                "ranks. The steps between them start no requests and are short."
            ),
        ),
    ] = 1

    def __post_init__(self) -> None:
        check_fields("expert_parallel", self)
