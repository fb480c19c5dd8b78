"""Prompts made of vectors, or of text, token ids and vectors one after the other."""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from penstock_common.errors import InvalidArgument
from penstock_common.types.prompt_embeds import IS_TOKEN, IS_VECTOR, PromptEmbeds
from penstock_frontend.call_types import MixedPrompt


class JoinedPrompt(NamedTuple):
    """Token ids, one per position, and the vectors; a token id means nothing where there is a vector."""

    token_ids: list[int]
    embeds: PromptEmbeds | None

    def last(self, count: int) -> "JoinedPrompt":
        """The last ``count`` positions."""
        return JoinedPrompt(self.token_ids[-count:], self.embeds.last(count) if self.embeds is not None else None)


async def join_parts(
    prompt: MixedPrompt, encode: Callable[[str, bool], Awaitable[list[int]]], *, max_positions: int, what: str
) -> JoinedPrompt:
    """Put the parts together. ``encode`` tokenizes a text; the flag says that it opens the prompt. Not more than
    ``max_positions`` are put together; ``what`` names that limit.

    Raises InvalidArgument for an empty part, too many positions, and for vectors of different lengths or types.
    """
    vectors = [part for part in prompt.parts if isinstance(part, PromptEmbeds)]
    first = vectors[0] if vectors else None
    token_ids: list[int] = []
    is_token = bytearray()
    for index, (part, field) in enumerate(zip(prompt.parts, prompt.fields, strict=True)):
        ids: Sequence[int]
        if isinstance(part, PromptEmbeds):
            _check_alike(part, first or part, field)
            ids, kind = range(part.num_tokens), IS_VECTOR
        else:
            ids, kind = await encode(part, index == 0) if isinstance(part, str) else part, IS_TOKEN
        if not ids:
            raise InvalidArgument(f"{field} is empty", field=field)
        if len(token_ids) + len(ids) > max_positions:
            raise InvalidArgument(
                f"prompt has {len(token_ids) + len(ids)} tokens and vectors up to {field}; {what} is {max_positions}",
                field="prompt",
                reason="PROMPT_TOO_LONG",
            )
        token_ids += ids if kind is IS_TOKEN else bytes(len(ids))
        is_token += kind * len(ids)
    if first is None:
        return JoinedPrompt(token_ids, None)
    embeds = PromptEmbeds(
        dtype=first.dtype,
        num_tokens=len(token_ids),
        hidden_size=first.hidden_size,
        data=first.data if len(vectors) == 1 else b"".join(part.data for part in vectors),
        is_token=bytes(is_token) if IS_TOKEN in is_token else b"",
    )
    return JoinedPrompt(token_ids, embeds)


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
