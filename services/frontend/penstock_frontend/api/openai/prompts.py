"""The prompts of a completion call: what they are, and what the answer needs to know of them."""

from collections.abc import Mapping, Sequence

import msgspec

from penstock_common.errors import InvalidArgument, RequestFailed
from penstock_frontend.api.openai.errors import renamed
from penstock_frontend.calls.generate import AsyncLLM

AS_MANY_AS_FIT = -1
"""What ``truncate_prompt_tokens`` says for as many tokens as leave room for the output."""
Given = str | list[int]
"""Text, or token ids used as they are."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt on its way to an engine. ``echo``: its text, for answers that begin with it.

    ``token_ids``: known where the answer speaks of them, else None; ``names`` as in ``Generation``.
    """

    given: Given
    token_ids: list[int] | None
    echo: str
    names: Mapping[str, str]


def split(prompt: str | Sequence[str | int | list[int]], limit: int) -> list[Given]:
    """The prompts of a body's ``prompt``. Raises InvalidArgument: none, more than ``limit``, ids beside texts."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidArgument("prompt is empty: there is no prompt", field="prompt")
    if set(map(type, prompt)) == {int}:  # there may be a million, and the event loop waits
        return [prompt]  # type: ignore[list-item]
    if len(prompt) > limit:
        raise InvalidArgument(f"prompt has {len(prompt)} prompts; limits.max_prompts is {limit}", field="prompt")
    prompts: list[Given] = []
    for index, each in enumerate(prompt):
        if isinstance(each, int):
            field = f"prompt[{index}]"
            raise InvalidArgument(f"{field} is {each}, beside others that are no token ids", field=field)
        prompts.append(each)
    return prompts


async def prepare(
    llm: AsyncLLM,
    given: Given,
    *,
    field: str,
    needs_ids: bool,
    echo: bool,
    keep: int | None,
    add_special_tokens: bool,
    skip_special_tokens: bool,
    names: Mapping[str, str],
) -> Prompt:
    """A prompt, tokenized and cut to its last ``keep`` tokens where that must be known here. Raises RequestFailed."""
    names = {"text": field, "token_ids.ids": field, "token_ids": field, "prompt": field, **names}
    if not given:
        raise InvalidArgument(f"{field} is empty: there is no prompt", field=field)
    cut_echo = echo and keep is not None
    token_ids = None if isinstance(given, str) else given
    text = given if isinstance(given, str) else ""
    try:
        if token_ids is None and (needs_ids or cut_echo):
            token_ids = (await llm.encode(text, add_special_tokens=add_special_tokens)).ids
        if token_ids is not None and keep is not None:
            token_ids = token_ids[-keep:]
        if echo and token_ids is not None and (cut_echo or not text):
            text = await llm.decode(token_ids, skip_special_tokens=skip_special_tokens)
    except RequestFailed as e:
        raise renamed(e, names) from e
    return Prompt(
        given=given if token_ids is None else token_ids, token_ids=token_ids, echo=text if echo else "", names=names
    )
