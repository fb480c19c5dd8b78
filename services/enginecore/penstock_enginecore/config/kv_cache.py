"""Settings of the paged KV cache, and of KV block transfer between engines."""

import ipaddress
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common import addresses
from penstock_common.config.checks import check_fields
from penstock_common.config.sections import ClientTlsConfig
from penstock_common.config.settings import ByteSize
from penstock_common.errors import ConfigError

_SPAN = 16
"""Number of tokens between states of recurrent layers. It equals ``SPAN`` of ``states.core.spec``."""


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The paged KV cache, with its tiers in host memory and on disk."""

    block_size: Annotated[int, Meta(ge=1, le=1024, description="Tokens per KV block.")] = 16
    dtype: Annotated[
        Literal["auto", "fp8"],
        Meta(
            description=(
                "Data type of the KV cache. auto: the model's type. fp8: 8-bit floats (e4m3), which take half "
                "the memory of bfloat16 and use the checkpoint's scales. On GPUs, fp8 needs compute capability "
                "8.9 or more. On CPUs, it needs model.attention_backend reference."
            )
        ),
    ] = "auto"
    kv_cache_memory: (
        Annotated[
            ByteSize,
            Meta(
                description=(
                    "Size of the KV cache in bytes. Unset, on a GPU: the memory that memory_utilization allows, minus "
                    "the memory that the model needs. Unset, on a CPU: a quarter of the machine's free memory, at most "
                    "4 GiB. Container memory limits are not considered."
                )
            ),
        ]
        | None
    ) = None
    memory_utilization: Annotated[
        float, Meta(ge=0.05, le=1, description="Fraction of the GPU's memory that the engine may use.")
    ] = 0.9
    num_blocks: (
        Annotated[
            int,
            Meta(
                ge=2,
                description=(
                    "Number of KV blocks, regardless of memory, for tests. Unset: as many blocks as fit into the "
                    "memory of the KV cache."
                ),
            ),
        ]
        | None
    ) = None
    enable_prefix_caching: Annotated[bool, Meta(description="Reuse the KV blocks of equal prompt prefixes.")] = True
    enable_kv_events: Annotated[
        bool,
        Meta(
            description=(
                "Report to external gateways, through frontends, which blocks become reusable and which blocks are "
                "evicted. The reports contain the blocks' tokens. Prefix-aware routing in frontends works without this "
                "setting."
            )
        ),
    ] = False

    state_share: Annotated[
        float,
        Meta(
            gt=0,
            lt=1,
            description=(
                "Fraction of the cache memory for kept states, for models with recurrent layers. Running requests take "
                "their states first, and KV blocks take the remainder."
            ),
        ),
    ] = 0.5
    state_interval: (
        Annotated[
            int,
            Meta(
                ge=_SPAN,
                description=(
                    "Tokens between the states that the prefix cache keeps of a sequence, for models with recurrent "
                    "layers; a multiple of 16. A later request with the same prefix recomputes at most this many "
                    "tokens. Unset: the distance at which states and KV blocks fill their memory at the same rate."
                ),
            ),
        ]
        | None
    ) = None

    host_memory: Annotated[
        ByteSize,
        Meta(
            description=(
                "Bytes of host memory, over all workers, for blocks evicted from the KV cache, and for states of "
                "recurrent layers. A later request loads such blocks instead of recomputing them. 0 disables this tier."
            )
        ),
    ] = 0

    disk: Annotated[
        str,
        Meta(
            description=(
                "Directory for blocks evicted from cache.host_memory. Each engine needs a separate directory. An "
                "engine with the same model finds the blocks again after a restart. Empty disables this tier."
            )
        ),
    ] = ""
    disk_size: Annotated[
        ByteSize, Meta(description="Bytes of the files in cache.disk, which are allocated at start.")
    ] = 0
    min_load_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "Minimum number of consecutive tokens to load from another tier or engine. Shorter runs are recomputed."
            ),
        ),
    ] = 64

    def __post_init__(self) -> None:
        check_fields("cache", self)
        if self.state_interval is not None and self.state_interval % _SPAN:
            raise ConfigError(
                f"cache.state_interval is {self.state_interval}; it must be a multiple of {_SPAN}, the number of tokens "
                "in a block"
            )
        if self.host_memory and not self.enable_prefix_caching:
            raise ConfigError(
                f"cache.host_memory is {self.host_memory}, but cache.enable_prefix_caching is false; blocks are found "
                "by their prefix, so set cache.enable_prefix_caching to true"
            )
        if self.disk and not self.host_memory:
            raise ConfigError(
                f"cache.disk is {self.disk!r}, but cache.host_memory is 0; the disk stores blocks evicted from host "
                "memory, so set cache.host_memory"
            )
        if bool(self.disk) != bool(self.disk_size):
            raise ConfigError(
                f"cache.disk is {self.disk!r} and cache.disk_size is {self.disk_size}; set both of them or neither"
            )


DEFAULT_PORT = 50054


class KvTransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV block transfer between engines, so that the receiving engine need not recompute the blocks."""

    transport: Annotated[
        Literal["auto", "grpc", "shared_memory", "nixl", "off"],
        Meta(
            description=(
                "Transport for KV blocks between engines. auto: the best that both engines support: shared memory "
                "(/dev/shm) on one host, NIXL if it is installed, otherwise gRPC. off: the engine neither sends nor "
                "receives blocks."
            )
        ),
    ] = "off"
    port: Annotated[
        int,
        Meta(
            ge=0,
            le=65_535,
            description=(
                "Port on which the engine listens for other engines, with the interface and the certificate of "
                "server. 0: any free port."
            ),
        ),
    ] = DEFAULT_PORT
    advertise: Annotated[
        str,
        Meta(
            description=(
                "Address at which other engines reach this engine for blocks, as host:port or host. Without a port, "
                "kv_transfer.port is used. Empty: the host of coordinator.advertise, or the host name."
            )
        ),
    ] = ""
    allowed_addresses: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "Addresses from which this engine may pull blocks: hosts, host:port, or networks such as "
                "10.0.0.0/8. Empty: any address that a frontend names. Frontends get the addresses of engines "
                "from the coordinator."
            )
        ),
    ] = ()
    lease: Annotated[
        float,
        Meta(
            ge=0.05,
            le=3600,
            description="Seconds that the blocks of a handed-over request are kept while no engine pulls them.",
        ),
    ] = 5.0
    max_lease: Annotated[
        float,
        Meta(
            ge=0.05,
            le=86_400,
            description=(
                "Maximum seconds that the blocks of a handed-over request are kept, even while an engine pulls them."
            ),
        ),
    ] = 600.0
    max_leased_fraction: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description=(
                "Maximum fraction of the KV cache for blocks of handed-over requests. Blocks above the limit are "
                "recomputed by the other engine."
            ),
        ),
    ] = 0.5
    silence: Annotated[
        float,
        Meta(
            ge=0.05,
            le=60,
            description="Seconds without a message after which an engine that is sending blocks counts as lost.",
        ),
    ] = 1.0
    arena: Annotated[
        ByteSize,
        Meta(
            ge=1024 * 1024,
            description=(
                "Bytes of shared memory (/dev/shm), or of memory registered with NIXL, through which the engine "
                "sends blocks. The memory is allocated at start."
            ),
        ),
    ] = 64 * 1024 * 1024
    connector: Annotated[
        str,
        Meta(
            description=(
                "Connector that loads KV blocks instead of kv_transfer.transport and cache.host_memory. The value is "
                "the name of a plugin's connector, or package.module:Class. The connector gets the kv_transfer_params "
                "of requests. Empty: no connector."
            )
        ),
    ] = ""
    tls: ClientTlsConfig = ClientTlsConfig()

    def __post_init__(self) -> None:
        check_fields("kv_transfer", self)
        if self.advertise:
            try:
                addresses.with_default_port(self.advertise, self.port or 1)
            except ValueError as e:
                raise ConfigError(f"kv_transfer.advertise is {self.advertise!r}; it {e}") from None
        for place, text in enumerate(self.allowed_addresses):
            _check_allowed(place, text)
        if self.connector and self.enabled:
            raise ConfigError(
                f"kv_transfer.connector is {self.connector!r} and kv_transfer.transport is {self.transport!r}; only "
                "one of them can load blocks, so set kv_transfer.transport to 'off'"
            )
        if self.max_lease < self.lease:
            raise ConfigError(
                f"kv_transfer.max_lease is {self.max_lease:g}; it must be at least kv_transfer.lease, which is {self.lease:g}"
            )

    @property
    def enabled(self) -> bool:
        """Whether the engine sends KV blocks to other engines and receives KV blocks from them."""
        return self.transport != "off"

    def allows(self, address: str) -> bool:
        """Return whether this engine may pull KV blocks from ``address`` (host:port)."""
        try:
            host, _ = addresses.split(address)
        except ValueError:
            return False
        return not self.allowed_addresses or any(_matches(host, address, each) for each in self.allowed_addresses)


def _check_allowed(place: int, text: str) -> None:
    if "/" not in text:
        try:
            addresses.with_default_port(text, 1)
        except ValueError as e:
            raise ConfigError(f"kv_transfer.allowed_addresses[{place}] is {text!r}; it {e}") from None
        return
    try:
        ipaddress.ip_network(text)
    except ValueError as e:
        raise ConfigError(
            f"kv_transfer.allowed_addresses[{place}] is {text!r}; it is not a valid IP network (CIDR): {e}"
        ) from None


def _matches(host: str, address: str, allowed: str) -> bool:
    if "/" in allowed:
        try:
            return ipaddress.ip_address(host) in ipaddress.ip_network(allowed)
        except ValueError:  # The host is a name, not an IP address.
            return False
    if allowed in (address, host):
        return True
    return addresses.with_default_port(allowed, 1) == addresses.with_port(host, 1)
