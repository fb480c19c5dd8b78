"""Encoders that compute rows from names, so that tests can predict the workers' use of rows."""

from collections.abc import Sequence

import numpy as np
import torch

from penstock_common.types.media import Modality, MultiModalFeature
from penstock_enginecore.core.model_info import MediaInfo
from penstock_enginecore.models.multimodal.base import EncodedItem, EncoderItem, RopeIndex, RopePositions

NUM_BLOCKS = 4
BAD = "bad"
"""Beginning of the identifiers of items that fail at their last block."""


def rows_of(identifier: str, num_embeds: int, width: int) -> torch.Tensor:
    """Return the rows of an item, float32 ``[num_embeds, width]``."""
    generator = torch.Generator().manual_seed(sum(identifier.encode()))
    return torch.randn(num_embeds, width, generator=generator)


class FakeMediaEncoder:
    """``MediaEncoder`` whose rows are ``rows_of`` the identifiers. An identifier with "short" gets one row too few.

    If ``has_sections`` is set, the embeddings of an item have the item's start as time position, and increasing
    heights.
    """

    def __init__(
        self, hidden: int, *, num_deepstack: int = 0, has_sections: bool = False, both_ways: bool = False
    ) -> None:
        info = MediaInfo(
            modality="image", num_blocks=NUM_BLOCKS, max_embeds=8, max_tokens=9, max_span=9 if both_ways else 0
        )
        self.media: Sequence[MediaInfo] = (info,)
        self.width = hidden * (1 + num_deepstack)
        self.num_deepstack = num_deepstack
        self.windowed_spans = False
        self.rope_positions: RopeIndex | None = self._rope_positions if has_sections else None
        self.modules: Sequence[torch.nn.Module] = (torch.nn.Linear(3, 2, bias=False),)
        self.queue: list[tuple[EncoderItem, int]] = []
        self.num_slices = 0

    def start(self, item: EncoderItem) -> None:
        """See ``MediaEncoder``. Raises ValueError for an item without data."""
        if not item.data:
            raise ValueError("there is no data")
        self.queue.append((item, 0))

    def drop(self, identifier: str) -> None:
        """See ``MediaEncoder``."""
        self.queue = [(item, done) for item, done in self.queue if item.identifier != identifier]

    def advance(self, budget: int) -> list[EncodedItem]:
        """See ``MediaEncoder``."""
        self.num_slices += 1
        done: list[EncodedItem] = []
        first = True
        while self.queue and (first or self.queue[0][0].num_embeds <= budget):
            first = False
            item, blocks = self.queue.pop(0)
            budget -= item.num_embeds
            if blocks + 1 < NUM_BLOCKS:
                self.queue.insert(0, (item, blocks + 1))
            elif item.identifier.startswith(BAD):
                done.append(EncodedItem(item.identifier, None, "it is bad"))
            else:
                count = item.num_embeds - ("short" in item.identifier)
                done.append(EncodedItem(item.identifier, rows_of(item.identifier, count, self.width)))
        return done

    @property
    def has_work(self) -> bool:
        """See ``MediaEncoder``."""
        return bool(self.queue)

    def _rope_positions(self, token_ids: Sequence[int], features: Sequence[MultiModalFeature]) -> RopePositions:
        positions = np.tile(np.arange(len(token_ids)), (3, 1))
        for feature in features:
            inside = np.arange(feature.length)
            positions[0, feature.offset : feature.end] -= inside
            positions[2, feature.offset : feature.end] -= inside
            positions[:, feature.end :] -= 2
        return RopePositions(positions, -2 * len(features))

    def largest(self, modality: Modality) -> EncoderItem:
        """See ``MediaEncoder``."""
        return EncoderItem("largest", modality, self.media[0].max_embeds, {"pixel_values": None})  # type: ignore[dict-item]
