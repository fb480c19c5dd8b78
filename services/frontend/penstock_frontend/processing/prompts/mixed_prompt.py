"""Prompts made of vectors, or of text, media, token ids and vectors one after the other."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from penstock_common.errors import InvalidArgument
from penstock_common.types.media import MultiModalFeature
from penstock_common.types.prompt_embeds import IS_TOKEN, IS_VECTOR, PromptEmbeds
from penstock_frontend.call_types import MediaPart, MixedPrompt
from penstock_frontend.processing.prompts.media_text import MediaText, PlacedMedia

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
