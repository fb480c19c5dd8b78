"""LoRA adapters."""

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_fields
from penstock_common.config.sizes import ByteSize


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoRA adapters that requests may name."""

    max_loras: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="Adapters among requests that run at once; requests without one do not count. 0: requests with an "
            "adapter are refused.",
        ),
    ] = 0
    max_lora_rank: Annotated[int, Meta(ge=1, le=512, description="Largest rank of an adapter that is served.")] = 64
    cpu_memory: Annotated[
        ByteSize,
        Meta(
            ge=1024 * 1024,
            description="Bytes of host memory for adapters, of each worker. Those used least recently make room for others; "
            "those that requests have, and pinned ones, stay.",
        ),
    ] = 1024 * 1024 * 1024
    max_wait: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="Seconds that a request waits at most while others keep max_loras adapters busy, before one of these "
            "admits no more and makes room for it.",
        ),
    ] = 5.0

    def __post_init__(self) -> None:
        check_fields("lora", self)

    @property
    def enabled(self) -> bool:
        """Whether requests may have adapters."""
        return self.max_loras > 0
