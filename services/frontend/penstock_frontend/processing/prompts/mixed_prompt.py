"""Mixed prompts, which consist of texts, media, token ids and embeddings in any order."""

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.types.media import EmbedRun, Modality, MultiModalFeature
from penstock_common.types.prompt_embeds import IS_TOKEN, IS_VECTOR, PromptEmbeds
from penstock_common.types.request import RequestContext
from penstock_common.types.sampling import SamplingParams
from penstock_frontend.call_types import MediaPart, MixedPrompt
from penstock_frontend.interfaces import ModelLimits
from penstock_frontend.processing.media.families.base import Family, MediaPreparer, PreparedMedia, Replacement
from penstock_frontend.processing.prompts.tokenizer import Tokenizer, joined

# The code below checks and prepares media, and tokenizes texts that contain media.


class PlacedMedia(NamedTuple):
    """A media item in a prompt, and the tokens that replace the item's placeholder.

    Attributes:
        prepared: The media item after processing.
        replacement: Tokens that replace the item's placeholder.
        stand_in: Text that the tokenizer converts to the placeholder token.
        placeholder_id: Id of the placeholder token.
    """

    prepared: PreparedMedia
    replacement: Replacement
    stand_in: str
    placeholder_id: int

    @property
    def text(self) -> str:
        """Text that is tokenized in the place of the media item."""
        return f"{self.replacement.before}{self.stand_in}{self.replacement.after}"


class MediaText(NamedTuple):
    """Texts and media that are tokenized together in one call. Two texts are never adjacent in ``parts``."""

    parts: tuple[str | PlacedMedia, ...]

    @property
    def text(self) -> str:
        """The texts joined, with the stand-in text in the place of each media item."""
        return joined(part if isinstance(part, str) else part.text for part in self.parts)

    @property
    def has_text(self) -> bool:
        """Whether there is any text besides the media."""
        return any(isinstance(part, str) for part in self.parts)

    def filled(self, token_ids: Sequence[int], offset: int) -> tuple[list[int], list[MultiModalFeature]]:
        """Replace the placeholders of media in ``token_ids``, which are the token ids of ``text``.

        Return the new token ids, and the features of the media items.

        ``offset`` is the number of prompt tokens before the text. Raises RuntimeError if ``token_ids`` do not belong to
        ``text``.
        """
        placed = [part for part in self.parts if isinstance(part, PlacedMedia)]
        filled: list[int] = []
        features: list[MultiModalFeature] = []
        begin = 0
        for item in placed:
            try:
                place = token_ids.index(item.placeholder_id, begin)
            except ValueError:
                raise RuntimeError(
                    "the token ids do not contain the placeholder token of each media item in the text"
                ) from None
            filled += token_ids[begin:place]
            features.append(feature_of(item, offset + len(filled)))
            filled += item.replacement.token_ids
            begin = place + 1
        filled += token_ids[begin:]
        return filled, features


def feature_of(placed: PlacedMedia, offset: int) -> MultiModalFeature:
    """Return the feature of a media item whose tokens begin at ``offset`` in the prompt.

    The feature covers the positions from the item's first embedding to its last embedding.
    """
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
    """Return the identifier of a media item in a prompt.

    If other media in the prompt change the encoder's input for this item, the identifier also depends on that change.
    """
    identifier, variant = placed.prepared.identifier, placed.replacement.variant
    return hashlib.blake2b(f"{identifier}:{variant}".encode(), digest_size=32).hexdigest() if variant else identifier


def media_tokens(features: Iterable[MultiModalFeature]) -> dict[Modality, int]:
    """Return the number of prompt positions that stand for media, by modality."""
    counts: dict[Modality, int] = {}
    for feature in features:
        counts[feature.modality] = counts.get(feature.modality, 0) + feature.length
    return counts


# The code below checks whether the model accepts the media of a prompt, prepares the media, and finds the tokens that
# replace their placeholders.

A = {"image": "an image", "audio": "a sound", "video": "a video"}


class MediaInputs(NamedTuple):
    """Tokenizer and media preparer of a frontend whose model accepts media."""

    tokenizer: Tokenizer
    preparer: MediaPreparer

    async def placed(self, prompt: MixedPrompt, context: RequestContext) -> list[PlacedMedia]:
        """Prepare the media of a prompt, in order. ``check_media`` must have been called before. Raises the errors of
        ``MediaPreparer.prepare``.
        """
        parts, family = prompt.media, self.preparer.family
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


def check_media(parts: Sequence[MediaPart], family: Family | None, no_media: str = "") -> None:
    """Raise InvalidArgument for media that the server does not accept. ``family`` and ``no_media`` have the same
    meaning as in ``accepted``.
    """
    for part in parts:
        if family is None or part.modality not in family.modalities:
            what = A.get(part.modality, repr(part.modality))
            raise InvalidArgument(f"{part.field} is {what}; {accepted(family, no_media)}", field=part.field)


def accepted(family: Family | None, no_media: str) -> str:
    """Return the end of an error message, which states the parts that prompts may have.

    Args:
        family: Media family of the model, or None if only text is accepted.
        no_media: The reason why this server accepts only text for a multimodal model. Empty for a text-only model.
    """
    if family is None and no_media:
        return f"this server accepts only text: {no_media}"
    return f"this model accepts {', '.join(['text', *sorted(family.modalities if family is not None else ())])}"


def check_engines(parts: Sequence[MediaPart], limits: ModelLimits) -> None:
    """Raise InvalidArgument for media that none of the engines accepts."""
    for part in parts:
        if part.modality not in [each.modality for each in limits.media]:
            raise InvalidArgument(
                f"{part.field} is {A.get(part.modality, repr(part.modality))}; the engines do not accept media of "
                "this modality, because "
                "their setting multimodal.enabled is false",
                field=part.field,
            )


def check_beside_media(prompt: MixedPrompt, params: SamplingParams) -> None:
    """Raise Unimplemented for an option that cannot be used together with media in the prompt.

    Raise InvalidArgument for a prompt that has both embeddings and media.
    """
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
                f"{field} has embeddings and {first} is media; a prompt cannot have both", field=field
            )


def no_media_with(field: str, media_field: str) -> Unimplemented:
    """Return the error for an option that cannot be used together with media in the prompt."""
    return Unimplemented(
        f"{field} is set, but it is not supported for prompts with media ({media_field}); remove it", field=field
    )


_Encode = Callable[[str, bool], Awaitable[list[int]]]
_Piece = str | Sequence[int] | PromptEmbeds | MediaText


class JoinedPrompt(NamedTuple):
    """Prompt after its parts were joined.

    Attributes:
        token_ids: One token id for each position. At a position with an embedding, the token id has no meaning.
        embeds: Embeddings of the prompt. None if the prompt has no embeddings.
        features: Features of the media items, in the order of their positions.
    """

    token_ids: list[int]
    embeds: PromptEmbeds | None
    features: Sequence[MultiModalFeature] = ()

    def last(self, count: int) -> "JoinedPrompt":
        """Return a prompt with only the last ``count`` positions of this prompt. This prompt must not have media."""
        return JoinedPrompt(self.token_ids[-count:], self.embeds.last(count) if self.embeds is not None else None)


async def join_parts(
    prompt: MixedPrompt, encode: _Encode, *, max_positions: int, what: str, media: Sequence[PlacedMedia] = ()
) -> JoinedPrompt:
    """Join the parts of a prompt. The prompt may have at most ``max_positions`` positions. ``what`` is the name of this
    limit in errors.

    ``encode`` tokenizes a text. The second argument of ``encode`` is True for text at the start of the prompt.
    ``media`` are the prepared media, in order.

    Raises InvalidArgument for an empty part, for too many positions, or for embeddings of different sizes or dtypes.
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
    """Yield the pieces of a prompt, each with the name of its last part. Each piece is tokenized separately.

    A text forms one piece with the media next to it. Two adjacent texts are separate pieces. Raises InvalidArgument for
    an empty text.
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
            f"{field} has {part.dtype} embeddings of size {part.hidden_size}; all embeddings of the prompt must be "
            f"{first.dtype} of size {first.hidden_size}, as the first ones are",
            field=field,
        )


def text_context(token_ids: Sequence[int], embeds: PromptEmbeds | None) -> Sequence[int]:
    """Return the tokens after the last embedding of the prompt.

    The detokenizer needs the last of these tokens, because it decodes them together with the first output tokens.
    """
    if embeds is None:
        return token_ids
    last = embeds.is_token.rfind(IS_VECTOR) if embeds.is_token else embeds.num_tokens - 1
    return token_ids[last + 1 :]
