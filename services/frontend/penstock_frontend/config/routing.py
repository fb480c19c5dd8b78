"""Which engine a request goes to; prompts and outputs may be computed on different engines."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common.addresses import with_default_port
from penstock_common.config.checks import check_fields
from penstock_common.errors import ConfigError

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


class DisaggregationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests in two legs, where some engines are preferred for prompts (role: prefill)."""

    min_prefill_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000_000,
            description="Tokens that the engine of the output would have to compute at least, for an engine of prompts to "
            "compute them.",
        ),
    ] = 512
    overflow: Annotated[
        bool,
        Meta(
            description="Have the engine of the output compute a long prompt where the engines of prompts have more to do than "
            "that one; false: they compute all long ones, however many wait."
        ),
    ] = True
    gateway: Annotated[
        bool,
        Meta(
            description="Serve kv_transfer_params of requests, in NIXL's words, for gateways that have prompts and outputs "
            "computed by different servers."
        ),
    ] = False
    connector: Annotated[
        str,
        Meta(
            description="Name, told to gateways, of the connector that a plugin adds to engines (their kv_transfer.connector): "
            "kv_transfer_params go to it as they are. Empty: they are in NIXL's words, for the engines' own transfers."
        ),
    ] = ""
    allowed_addresses: Annotated[
        tuple[str, ...],
        Meta(
            description="Hosts, or host:port, that these may name beside the engines that the frontend knows; others are not "
            "asked for keys and values, which are computed then."
        ),
    ] = ()

    def __post_init__(self) -> None:
        check_fields("disaggregation", self)
        for place, text in enumerate(self.allowed_addresses):
            try:
                with_default_port(text, 1)
            except ValueError as e:
                raise ConfigError(f"disaggregation.allowed_addresses[{place}] is {text!r}; it {e}") from None
        if self.connector and not self.gateway:
            raise ConfigError(
                f"disaggregation.connector is {self.connector!r} and disaggregation.gateway false; set gateway to true, or leave "
                "connector empty"
            )
