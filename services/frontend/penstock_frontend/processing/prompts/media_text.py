"""Texts with media between: tokenized as one text, as the model's processor in transformers does it, and filled with what
stands for the media.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock_common.types.media import EmbedRun, Modality, MultiModalFeature
from penstock_frontend.processing.media.base import PreparedMedia
from penstock_frontend.processing.media.item import Replacement
from penstock_frontend.processing.prompts.guarded_text import joined


class PlacedMedia(NamedTuple):
    """An item and what stands for it. ``stand_in``: its placeholder, as the tokenizer knows it; ``placeholder_id``: of that
    token.
    """

    prepared: PreparedMedia
    replacement: Replacement
    stand_in: str
    placeholder_id: int

    @property
    def text(self) -> str:
        """What is tokenized in its place."""
        return f"{self.replacement.before}{self.stand_in}{self.replacement.after}"


class MediaText(NamedTuple):
    """``parts``: texts and media; no two texts stand side by side."""

    parts: tuple[str | PlacedMedia, ...]

    @property
    def text(self) -> str:
        """All of it, with a stand-in for each item."""
        return joined(part if isinstance(part, str) else part.text for part in self.parts)

    @property
    def has_text(self) -> bool:
        """Whether there is anything but media."""
        return any(isinstance(part, str) for part in self.parts)

    def filled(self, token_ids: Sequence[int], offset: int) -> tuple[list[int], list[MultiModalFeature]]:
        """The token ids of ``text`` with what stands for each item in place of its placeholder, and the items; ``offset``:
        tokens of the prompt before. Raises RuntimeError for token ids that are not those of ``text``.
        """
        placed = [part for part in self.parts if isinstance(part, PlacedMedia)]
        filled: list[int] = []
        features: list[MultiModalFeature] = []
        begin = 0
        for item in placed:
            try:
                place = token_ids.index(item.placeholder_id, begin)
            except ValueError:
                raise RuntimeError("a placeholder of media has no token in the text that it stands in") from None
            filled += token_ids[begin:place]
            features.append(feature_of(item, offset + len(filled)))
            filled += item.replacement.token_ids
            begin = place + 1
        filled += token_ids[begin:]
        return filled, features


def feature_of(placed: PlacedMedia, offset: int) -> MultiModalFeature:
    """The item at ``offset``, from the first position that has a row to the last one."""
    replacement, item = placed.replacement, placed.prepared.item
    runs = replacement.embed_runs or (EmbedRun(0, len(replacement.token_ids)),)
    start, end = runs[0].start, runs[-1].start + runs[-1].count
    return MultiModalFeature(
        modality=item.modality,
        identifier=identifier_of(placed),
        offset=offset + start,
        length=end - start,
        embed_runs=tuple(EmbedRun(run.start - start, run.count) for run in runs) if len(runs) > 1 else (),
        data=replacement.data or item.data,
    )


def identifier_of(placed: PlacedMedia) -> str:
    """The item's own, or one derived of it where the media beside it change what the tower gets."""
    identifier, variant = placed.prepared.identifier, placed.replacement.variant
    return hashlib.blake2b(f"{identifier}:{variant}".encode(), digest_size=32).hexdigest() if variant else identifier


def media_tokens(features: Iterable[MultiModalFeature]) -> dict[Modality, int]:
    """Positions of a prompt that media stand at, by modality."""
    counts: dict[Modality, int] = {}
    for feature in features:
        counts[feature.modality] = counts.get(feature.modality, 0) + feature.length
    return counts
