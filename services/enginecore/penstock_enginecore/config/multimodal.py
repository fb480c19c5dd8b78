"""Images, sound and video in prompts."""

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_fields
from penstock_common.config.sizes import ByteSize
from penstock_common.errors import ConfigError
from penstock_common.memory import host_memory
from penstock_common.types.media import MODALITIES

_DEFAULT_RECEIVER_CACHE = 1024 * 1024 * 1024
_PART_OF_MEMORY = 16


class MultimodalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Images, sound and video in prompts, where the checkpoint has towers for them."""

    enabled: Annotated[
        bool, Meta(description="Load the checkpoint's towers. If not, the text model alone is loaded, and serves text.")
    ] = True
    encoder_cache_size: Annotated[
        int,
        Meta(
            ge=0,
            description="Embeddings that are kept of images, sound and video, and shared by prompts with the same ones. 0: twice "
            "scheduler.max_num_batched_tokens, and the largest item at least.",
        ),
    ] = 0
    limit_per_prompt: Annotated[
        dict[str, Annotated[int, Meta(ge=0, le=10_000)]],
        Meta(
            description="Items of a prompt at most, by modality: image, audio, video. 0: none are taken. What is not named here "
            "is limited by the length of prompts alone."
        ),
    ] = {}

    receiver_cache_bytes: (
        Annotated[
            ByteSize,
            Meta(
                ge=0,
                description="Bytes of host memory for processed media, of each frontend's session: what comes again is not sent "
                "again, and what several frontends send is there once. 0: each request brings its own. Unset: 1 GiB, or a "
                "sixteenth of the machine's memory where that is less.",
            ),
        ]
        | None
    ) = None
    shared_memory: Annotated[
        bool,
        Meta(
            description="Take processed media, and prompts as vectors, from frontends of the same host through shared memory "
            "(/dev/shm)."
        ),
    ] = True

    def __post_init__(self) -> None:
        check_fields("multimodal", self)
        if unknown := sorted(set(self.limit_per_prompt) - set(MODALITIES)):
            raise ConfigError(
                f"multimodal.limit_per_prompt names {unknown[0]!r}, which is none of {', '.join(MODALITIES)}"
            )

    @property
    def receiver_cache_quota(self) -> int:
        """Bytes that a session may have kept."""
        if self.receiver_cache_bytes is not None:
            return self.receiver_cache_bytes
        memory = host_memory()
        return (
            _DEFAULT_RECEIVER_CACHE if memory is None else min(_DEFAULT_RECEIVER_CACHE, memory.total // _PART_OF_MEMORY)
        )
