"""Images, sound and video in prompts."""

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_fields
from penstock_common.errors import ConfigError
from penstock_common.types.media import MODALITIES


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

    def __post_init__(self) -> None:
        check_fields("multimodal", self)
        if unknown := sorted(set(self.limit_per_prompt) - set(MODALITIES)):
            raise ConfigError(
                f"multimodal.limit_per_prompt names {unknown[0]!r}, which is none of {', '.join(MODALITIES)}"
            )
