"""The ports on which an engine's processes and other engines reach each other."""

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_fields


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The internal ports, on which workers, nodes, ranks and engines of one deployment reach each other."""

    secret_file: Annotated[
        str,
        Meta(
            description="Path of a file with a secret of 32 to 4096 bytes, by which internal ports recognize each other; the "
            "same secret for all engines and nodes, read once at the start. Empty: none, and internal ports must bind to "
            "loopback addresses or use TLS."
        ),
    ] = ""

    def __post_init__(self) -> None:
        check_fields("parallel", self)
