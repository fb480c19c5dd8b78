"""The paged KV cache, and the transfer of KV blocks between engines."""

import ipaddress
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common import addresses
from penstock_common.config.checks import check_fields
from penstock_common.config.sections import ClientTlsConfig
from penstock_common.config.settings import ByteSize
from penstock_common.errors import ConfigError


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The paged KV cache."""

    block_size: Annotated[int, Meta(ge=1, le=1024, description="Tokens of a block.")] = 16
    dtype: Annotated[
        Literal["auto", "fp8"],
        Meta(
            description="Type of the numbers in the KV cache; auto: the model's. fp8: 8-bit floats (e4m3) of half a bfloat16's "
            "memory, scaled as the checkpoint says, on GPUs of compute capability 8.9 and more; on a CPU with "
            "model.attention_backend reference alone."
        ),
    ] = "auto"
    kv_cache_memory: (
        Annotated[
            ByteSize,
            Meta(
                description="Bytes of the KV cache; unset: on a GPU what memory_utilization leaves after the model, on a CPU a "
                "quarter of the machine's free memory, 4 GiB at most. A container's memory limit is not looked at."
            ),
        ]
        | None
    ) = None
    memory_utilization: Annotated[
        float, Meta(ge=0.05, le=1, description="Fraction of the GPU's memory that the engine may use.")
    ] = 0.9
    num_blocks: (
        Annotated[int, Meta(ge=2, description="Blocks of the KV cache, whatever its memory is; meant for tests.")]
        | None
    ) = None
    enable_prefix_caching: Annotated[bool, Meta(description="Reuse the KV blocks of prompts that begin alike.")] = True
    enable_kv_events: Annotated[
        bool,
        Meta(
            description="Tell gateways outside, over frontends, which prefixes have become reusable and which no longer are, "
            "with their tokens. Frontends that route by prefix are told what they need in any case."
        ),
    ] = False

    host_memory: Annotated[
        ByteSize,
        Meta(
            description="Bytes of host memory, over all workers, for KV blocks that lose their place in the cache: what comes "
            "back is loaded and not computed again. 0: none."
        ),
    ] = 0

    disk: Annotated[
        str,
        Meta(
            description="Directory of one engine for KV blocks that leave cache.host_memory; what is there is found again by an "
            "engine of the same model. Empty: none."
        ),
    ] = ""
    disk_size: Annotated[ByteSize, Meta(description="Bytes of the file in cache.disk, taken at the start.")] = 0
    min_load_tokens: Annotated[
        int, Meta(ge=1, description="Tokens in a row that are loaded from elsewhere at least; fewer are computed.")
    ] = 64

    def __post_init__(self) -> None:
        check_fields("cache", self)
        if self.host_memory and not self.enable_prefix_caching:
            raise ConfigError(
                f"cache.host_memory is {self.host_memory} and cache.enable_prefix_caching false; blocks are found by prefix"
            )
        if self.disk and not self.host_memory:
            raise ConfigError(
                f"cache.disk is {self.disk!r} and cache.host_memory 0; a disk takes what leaves host memory"
            )
        if bool(self.disk) != bool(self.disk_size):
            raise ConfigError(
                f"cache.disk is {self.disk!r} and cache.disk_size {self.disk_size}; a disk cache needs a directory and a size"
            )


DEFAULT_PORT = 50054


class KvTransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys and values of requests from engine to engine: what one has computed another need not."""

    transport: Annotated[
        Literal["auto", "grpc", "shared_memory", "nixl", "off"],
        Meta(
            description="Way on which blocks go between engines; auto: the best that both have: shared memory (/dev/shm) on one "
            "host, NIXL where it is installed, else gRPC, which is always possible. off: the engine gives none and takes none."
        ),
    ] = "off"
    port: Annotated[
        int,
        Meta(
            ge=0,
            le=65_535,
            description="Port on which the engine listens for other engines, on the interface and with the certificate of "
            "server; 0: one that is free.",
        ),
    ] = DEFAULT_PORT
    advertise: Annotated[
        str,
        Meta(
            description="Address under which other engines reach this one for blocks: host:port, or a host alone, with this "
            "port; empty: the host of coordinator.advertise, else the host's name."
        ),
    ] = ""
    allowed_addresses: Annotated[
        tuple[str, ...],
        Meta(
            description="Where blocks may be pulled from: hosts, host:port or networks such as 10.0.0.0/8; empty: wherever a "
            "frontend says, which knows engines from the coordinator."
        ),
    ] = ()
    lease: Annotated[
        float,
        Meta(
            ge=0.05,
            le=3600,
            description="Seconds for which the blocks of a request that was handed over are kept while nobody pulls them.",
        ),
    ] = 5.0
    max_lease: Annotated[
        float, Meta(ge=0.05, le=86_400, description="Seconds after which they are not kept any longer in any case.")
    ] = 600.0
    max_leased_fraction: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Part of the KV cache that may be kept like that; what goes beyond it is computed again elsewhere.",
        ),
    ] = 0.5
    silence: Annotated[
        float,
        Meta(
            ge=0.05,
            le=60,
            description="Seconds without a word after which an engine that owes blocks counts as gone.",
        ),
    ] = 1.0
    arena: Annotated[
        ByteSize,
        Meta(
            ge=1024 * 1024,
            description="Bytes of shared memory (/dev/shm), or of memory registered with NIXL, through which the engine gives "
            "blocks; taken at the start.",
        ),
    ] = 64 * 1024 * 1024
    connector: Annotated[
        str,
        Meta(
            description="Connector that brings blocks in place of all of this and of cache.host_memory: a name that a plugin "
            "registered, or package.module:Class; it is given kv_transfer_params of requests. Empty: none."
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
                f"kv_transfer.connector is {self.connector!r} and kv_transfer.transport {self.transport!r}; one of them brings "
                "blocks: leave transport 'off'"
            )
        if self.max_lease < self.lease:
            raise ConfigError(
                f"kv_transfer.max_lease is {self.max_lease:g}; it must not be less than kv_transfer.lease = {self.lease:g}"
            )

    @property
    def enabled(self) -> bool:
        """Whether the engine gives blocks and takes them."""
        return self.transport != "off"

    def allows(self, address: str) -> bool:
        """Whether blocks may be pulled from ``address``, host:port."""
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
        raise ConfigError(f"kv_transfer.allowed_addresses[{place}] is {text!r}; it is no network: {e}") from None


def _matches(host: str, address: str, allowed: str) -> bool:
    if "/" in allowed:
        try:
            return ipaddress.ip_address(host) in ipaddress.ip_network(allowed)
        except ValueError:  # a name
            return False
    if allowed in (address, host):
        return True
    return addresses.with_default_port(allowed, 1) == addresses.with_port(host, 1)
