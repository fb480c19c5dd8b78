"""Keys and values of requests from engine to engine."""

import ipaddress
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common import addresses
from penstock_common.config.checks import check_fields
from penstock_common.config.sections import ClientTlsConfig
from penstock_common.config.sizes import ByteSize
from penstock_common.errors import ConfigError

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
