"""Media of prompts: checked against the model, prepared, and given what stands for them."""

from collections.abc import Sequence
from typing import NamedTuple

from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request_context import RequestContext
from penstock_common.types.sampling import SamplingParams
from penstock_frontend.call_types import MixedPrompt
from penstock_frontend.media_parts import MediaPart
from penstock_frontend.processing.media.base import MediaPreparer
from penstock_frontend.processing.media.families.base import Family
from penstock_frontend.processing.prompts.media_text import PlacedMedia
from penstock_frontend.processing.prompts.tokenizer import Tokenizer

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
