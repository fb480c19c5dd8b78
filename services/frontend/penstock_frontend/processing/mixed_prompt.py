"""Prompts made of vectors, or of text, token ids and vectors one after the other."""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec

from penstock_common.errors import InvalidArgument
from penstock_common.types.prompt_embeds import PromptEmbeds

Part = str | Sequence[int] | PromptEmbeds


class MixedPrompt(msgspec.Struct, frozen=True):
    """The parts of a prompt, in order. ``fields``: what each is called in the request, for errors."""

    parts: tuple[Part, ...]
    fields: tuple[str, ...]


class Assembled(NamedTuple):
    """Token ids, one per position, and the vectors; a token id means nothing where there is a vector."""

    token_ids: list[int]
    embeds: PromptEmbeds | None

    def last(self, count: int) -> "Assembled":
        """The last ``count`` positions."""
        if self.embeds is None:
            return Assembled(self.token_ids[-count:], None)
        kept = msgspec.structs.replace(
            self.embeds,
            num_tokens=min(count, self.embeds.num_tokens),
            data=self.embeds.data[-count * self.embeds.row_bytes :],
            is_token=self.embeds.is_token[-count:],
        )
        return Assembled(self.token_ids[-count:], kept)


async def assemble(prompt: MixedPrompt, encode: Callable[[str, bool], Awaitable[list[int]]]) -> Assembled:
    """Put the parts together. ``encode`` tokenizes a text; the flag says that it opens the prompt.

    Raises InvalidArgument for an empty part, and for vectors of different lengths or types.
    """
    vectors = [part for part in prompt.parts if isinstance(part, PromptEmbeds)]
    first = vectors[0] if vectors else None
    token_ids: list[int] = []
    is_token: list[bool] = []
    rows: list[bytes] = []
    for index, (part, field) in enumerate(zip(prompt.parts, prompt.fields, strict=True)):
        if isinstance(part, PromptEmbeds):
            _check_alike(part, first or part, field)
            ids, data = [0] * part.num_tokens, part.data
        else:
            ids = await encode(part, index == 0) if isinstance(part, str) else list(part)
            data = bytes(len(ids) * first.row_bytes) if first else b""
        if not ids:
            raise InvalidArgument(f"{field} is empty", field=field)
        token_ids += ids
        is_token += [not isinstance(part, PromptEmbeds)] * len(ids)
        rows.append(data)
    if first is None:
        return Assembled(token_ids, None)
    embeds = PromptEmbeds(
        dtype=first.dtype,
        num_tokens=len(token_ids),
        hidden_size=first.hidden_size,
        data=b"".join(rows),
        is_token=tuple(is_token) if any(is_token) else (),
    )
    return Assembled(token_ids, embeds)


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
    last = next((i for i in range(len(token_ids) - 1, -1, -1) if embeds.is_vector(i)), -1)
    return token_ids[last + 1 :]
