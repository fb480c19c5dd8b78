"""The nodes that an engine's workers run on."""

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock_common import addresses
from penstock_common.config.checks import check_fields
from penstock_common.config.sections import ClientTlsConfig
from penstock_common.errors import ConfigError


class NodesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hosts that the workers run on: that of the engine, which is number 0, and those of
    ``python -m penstock_enginecore worker``, which are to have the same configuration.
    """

    size: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Nodes, that of the engine among them; each has as many whole stages.",
        ),
    ] = 1
    index: Annotated[
        int, Meta(ge=0, le=63, description="Which of the nodes a worker process is for, from 1 on; the engine is 0.")
    ] = 0
    leader: Annotated[
        str,
        Meta(
            description="Where the engine is for its other nodes, as host or host:port; executor.nodes.port is the port."
        ),
    ] = ""
    port: Annotated[
        int,
        Meta(ge=0, le=65_535, description="Port on which the engine listens for its other nodes; 0: one that is free."),
    ] = 50061
    address: Annotated[
        str,
        Meta(
            description="IP address of this node at which the others reach it, with what stages send each other; empty: the one "
            "that the host's name stands for, on the other nodes the one from which they reach the engine."
        ),
    ] = ""
    timeout: Annotated[
        float,
        Meta(ge=1, le=86_400, description="Seconds in which all nodes must have come together."),
    ] = 600.0
    tls: ClientTlsConfig = ClientTlsConfig()

    def __post_init__(self) -> None:
        check_fields("executor.nodes", self)
        if self.leader:
            try:
                addresses.with_default_port(self.leader, self.port or 1)
            except ValueError as e:
                raise ConfigError(f"executor.nodes.leader is {self.leader!r}; it {e}") from None
        if self.index >= self.size > 1:
            raise ConfigError(
                f"executor.nodes.index is {self.index} and executor.nodes.size {self.size}; nodes are 0 to {self.size - 1}"
            )
