"""Settings for the routing of requests to engines, and for disaggregated prefill."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common.addresses import with_default_port
from penstock_common.config.checks import check_fields
from penstock_common.errors import ConfigError

RoutingPolicy = Literal["prefix_aware", "least_loaded", "round_robin"]


class RoutingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for the choice of the engine, for requests that do not name an engine by rank."""

    policy: Annotated[
        RoutingPolicy,
        Meta(
            description=(
                "Choice of the engine for a request. prefix_aware: the engine for which the load minus its cached "
                "tokens of the prompt is lowest. least_loaded: the engine with the lowest load. round_robin: engines "
                "in turn."
            )
        ),
    ] = "prefix_aware"
    max_cached_blocks: Annotated[
        int,
        Meta(
            ge=0,
            le=100_000_000,
            description=(
                "Maximum number of cached blocks that the frontend tracks for prefix_aware. A block counts once for "
                "each engine that has cached it, and needs up to 250 bytes of memory. 0: the frontend tracks no blocks."
            ),
        ),
    ] = 2_000_000

    def __post_init__(self) -> None:
        check_fields("routing", self)


class DisaggregationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for disaggregated prefill.

    Prefill engines (role: prefill) compute prompts, and decode engines generate the outputs.
    """

    min_prefill_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000_000,
            description=(
                "Minimum number of prompt tokens for which a request uses a prefill engine. Tokens that the decode "
                "engine has cached do not count."
            ),
        ),
    ] = 512
    overflow: Annotated[
        bool,
        Meta(
            description=(
                "Let the decode engine compute a long prompt if prompts are queued at all prefill engines and the "
                "decode engine has less work than any of them. false: prefill engines compute all long prompts, "
                "regardless of their queues."
            )
        ),
    ] = True
    gateway: Annotated[
        bool,
        Meta(
            description=(
                "Accept and return kv_transfer_params, in the format of vLLM's NIXL connector. External gateways use "
                "them to run prefill and decode on different servers."
            )
        ),
    ] = False
    connector: Annotated[
        str,
        Meta(
            description=(
                "Name of the KV connector that a plugin adds to the engines (their kv_transfer.connector). The "
                "frontend reports this name to gateways. The connector gets kv_transfer_params unchanged. Empty: "
                "kv_transfer_params are in NIXL's format, for the engines' own transfers."
            )
        ),
    ] = ""
    allowed_addresses: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "Additional hosts, or host:port, that kv_transfer_params may name. Engines that the frontend knows are "
                "always allowed. If kv_transfer_params name any other address, the engine recomputes the KV blocks "
                "instead of fetching them."
            )
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
                f"disaggregation.connector is {self.connector!r}, but disaggregation.gateway is false; set gateway to true, or "
                "leave connector empty"
            )
