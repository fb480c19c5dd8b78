"""Checks and prepares the media of prompts, and tokenizes texts with media between."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.types.media import EmbedRun, Modality, MultiModalFeature
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request import RequestContext
from penstock_common.types.sampling import SamplingParams
from penstock_frontend.call_types import MediaPart, MixedPrompt
from penstock_frontend.processing.media.families.base import Family, MediaPreparer, PreparedMedia, Replacement
from penstock_frontend.processing.prompts.tokenizer import Tokenizer, joined


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


# Media of prompts: checked against the model, prepared, and given what stands for them.

A = {"image": "an image", "audio": "a sound", "video": "a video"}


class MediaInputs(NamedTuple):
    """What a frontend has for a model that takes media."""

    tokenizer: Tokenizer
    preparer: MediaPreparer

    async def placed(self, prompt: MixedPrompt, context: RequestContext) -> list[PlacedMedia]:
        """What the prompt's media come to, in order. Raises as ``check_media`` and ``MediaPreparer.prepare``."""
        parts, family = prompt.media, self.preparer.family
        check_media(parts, family)
        prepared = await self.preparer.prepare(
            parts, cache_salt=context.cache_salt, deadline=context.deadline, tenant=context.tenant
        )
        tokens = [family.placeholder(part.modality) for part in parts]
        try:
            replacements = family.replacements([each.item for each in prepared])
        except ValueError as e:
            raise InvalidArgument(f"{parts[0].field}: {e}", field=parts[0].field, reason="MEDIA_UNREADABLE") from None
        return [
            PlacedMedia(each, replacement, self.tokenizer.stand_in(token), self.tokenizer.token_id(token) or 0)
            for each, replacement, token in zip(prepared, replacements, tokens, strict=True)
        ]


def check_media(parts: Sequence[MediaPart], family: Family | None) -> None:
    """Raise InvalidArgument for media that the model does not take. ``family``: None for a model that reads text alone."""
    taken = sorted(family.modalities) if family is not None else []
    for part in parts:
        if part.modality not in taken:
            raise InvalidArgument(
                f"{part.field} is {A.get(part.modality, repr(part.modality))}; this model takes {', '.join(['text', *taken])}",
                field=part.field,
            )


def check_beside_media(prompt: MixedPrompt, params: SamplingParams) -> None:
    """Raise Unimplemented for what is not served of a prompt with media, InvalidArgument for vectors in one."""
    first = prompt.media[0].field
    for name, value in (
        ("prompt_logprobs", params.prompt_logprobs),
        ("truncate_prompt_tokens", params.truncate_prompt_tokens),
    ):
        if value is not None:
            raise no_media_with(f"sampling_params.{name}", first)
    for part, field in zip(prompt.parts, prompt.fields, strict=True):
        if isinstance(part, PromptEmbeds):
            raise InvalidArgument(
                f"{field} has vectors and {first} is media; a prompt has one or the other", field=field
            )


def no_media_with(field: str, media_field: str) -> Unimplemented:
    """What is not served of prompts with media."""
    return Unimplemented(f"{field} is set; it is not served beside media ({media_field}), so leave it out", field=field)
