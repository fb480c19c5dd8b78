"""Prompts of several parts: texts with media between, token ids and vectors."""

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.types.media import EmbedRun, Modality, MultiModalFeature
from penstock_common.types.prompt_embeds import IS_TOKEN, IS_VECTOR, PromptEmbeds
from penstock_common.types.request import RequestContext
from penstock_common.types.sampling import SamplingParams
from penstock_frontend.call_types import MediaPart, MixedPrompt
from penstock_frontend.processing.media.families.base import Family, MediaPreparer, PreparedMedia, Replacement
from penstock_frontend.processing.prompts.tokenizer import Tokenizer, joined

# Checks and prepares the media of prompts, and tokenizes texts with media between.


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


_Encode = Callable[[str, bool], Awaitable[list[int]]]
_Piece = str | Sequence[int] | PromptEmbeds | MediaText


class JoinedPrompt(NamedTuple):
    """Token ids, one per position, and the vectors; a token id means nothing where there is a vector. ``features``: the media,
    in the order of their places.
    """

    token_ids: list[int]
    embeds: PromptEmbeds | None
    features: Sequence[MultiModalFeature] = ()

    def last(self, count: int) -> "JoinedPrompt":
        """The last ``count`` positions of a prompt without media."""
        return JoinedPrompt(self.token_ids[-count:], self.embeds.last(count) if self.embeds is not None else None)


async def join_parts(
    prompt: MixedPrompt, encode: _Encode, *, max_positions: int, what: str, media: Sequence[PlacedMedia] = ()
) -> JoinedPrompt:
    """Put the parts together. ``encode`` tokenizes a text; the flag says that it opens the prompt. Not more than
    ``max_positions`` are put together; ``what`` names that limit. ``media``: what the prompt's media came to, in order.

    Raises InvalidArgument for an empty part, too many positions, and for vectors of different lengths or types.
    """
    vectors = [part for part in prompt.parts if isinstance(part, PromptEmbeds)]
    first = vectors[0] if vectors else None
    token_ids: list[int] = []
    is_token = bytearray()
    features: list[MultiModalFeature] = []
    for piece, field in _pieces(prompt, iter(media)):
        ids: Sequence[int]
        kind = IS_TOKEN
        if isinstance(piece, PromptEmbeds):
            _check_alike(piece, first or piece, field)
            ids, kind = range(piece.num_tokens), IS_VECTOR
        elif isinstance(piece, MediaText):
            ids = await encode(piece.text, not token_ids and piece.has_text)
            ids, placed = piece.filled(ids, len(token_ids))
            features += placed
        else:
            ids = await encode(piece, not token_ids) if isinstance(piece, str) else piece
        if not ids:
            raise InvalidArgument(f"{field} is empty", field=field)
        if len(token_ids) + len(ids) > max_positions:
            raise _too_long(len(token_ids) + len(ids), features, vectors, field, f"{what} is {max_positions}")
        token_ids += ids if kind is IS_TOKEN else bytes(len(ids))
        is_token += kind * len(ids)
    if first is None:
        return JoinedPrompt(token_ids, None, features)
    embeds = PromptEmbeds(
        dtype=first.dtype,
        num_tokens=len(token_ids),
        hidden_size=first.hidden_size,
        data=first.data if len(vectors) == 1 else b"".join(part.data for part in vectors),
        is_token=bytes(is_token) if IS_TOKEN in is_token else b"",
    )
    return JoinedPrompt(token_ids, embeds)


def _pieces(prompt: MixedPrompt, media: Iterator[PlacedMedia]) -> Iterable[tuple[_Piece, str]]:
    """What is tokenized, or taken, as one, each with the name of its last part: a text beside media is one with them, but two
    texts side by side are each their own. Raises InvalidArgument for an empty text.
    """
    open_: list[str | PlacedMedia] = []
    named = ""
    for part, field in zip(prompt.parts, prompt.fields, strict=True):
        is_text = isinstance(part, str)
        if open_ and not (isinstance(part, MediaPart) or (is_text and not isinstance(open_[-1], str))):
            yield _closed(open_), named
            open_ = []
        if isinstance(part, MediaPart):
            open_.append(next(media))
        elif isinstance(part, str):
            if not part:
                raise InvalidArgument(f"{field} is empty", field=field)
            open_.append(part)
        else:
            yield part, field
        named = field
    if open_:
        yield _closed(open_), named


def _closed(parts: Sequence[str | PlacedMedia]) -> str | MediaText:
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else MediaText(tuple(parts))


def _too_long(
    count: int, features: Sequence[MultiModalFeature], vectors: Sequence[PromptEmbeds], field: str, limit: str
) -> InvalidArgument:
    of_media = sum(feature.length for feature in features)
    what = "tokens and vectors" if vectors or not of_media else f"tokens, {of_media} of them media,"
    return InvalidArgument(
        f"prompt has {count} {what} up to {field}; {limit}", field="prompt", reason="PROMPT_TOO_LONG"
    )


def _check_alike(part: PromptEmbeds, first: PromptEmbeds, field: str) -> None:
    if (part.dtype, part.hidden_size) != (first.dtype, first.hidden_size):
        raise InvalidArgument(
            f"{field} has {part.dtype} vectors of {part.hidden_size} numbers; the first ones are {first.dtype} of "
            f"{first.hidden_size}",
            field=field,
        )


def text_context(token_ids: Sequence[int], embeds: PromptEmbeds | None) -> Sequence[int]:
    """The tokens at the end of a prompt, behind its last vector: what decoding the output may look back at."""
    if embeds is None:
        return token_ids
    last = embeds.is_token.rfind(IS_VECTOR) if embeds.is_token else embeds.num_tokens - 1
    return token_ids[last + 1 :]
