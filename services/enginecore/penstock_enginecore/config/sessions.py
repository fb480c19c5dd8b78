"""Limits of the sessions that frontends have with an engine."""

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_fields
from penstock_common.config.sizes import ByteSize


class SessionsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sessions of frontends, all of them together."""

    max_sessions: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description="Sessions that are open at once; a frontend has one. More are refused with RESOURCE_EXHAUSTED.",
        ),
    ] = 256
    max_tensor_bytes: Annotated[
        ByteSize,
        Meta(
            ge=64 * 1024 * 1024,
            description="Bytes of tensors in chunks (media, prompts as vectors) that wait for their requests, of all sessions. "
            "Beyond it the session that holds the most loses a tensor, and its request goes to another engine.",
        ),
    ] = 512 * 1024 * 1024

    def __post_init__(self) -> None:
        check_fields("sessions", self)
