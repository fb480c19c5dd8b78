"""The paged KV cache."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_fields
from penstock_common.config.sizes import ByteSize
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
