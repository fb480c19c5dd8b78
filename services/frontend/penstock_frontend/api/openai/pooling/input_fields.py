"""What the bodies of calls for vectors have in common: the inputs, and fields that are not served."""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from penstock_common.errors import InvalidArgument
from penstock_frontend.api.openai.body_fields import shown
from penstock_frontend.api.openai.errors import renamed
from penstock_frontend.api.openai.pooling.truncation_fields import TruncationFields
from penstock_frontend.api.openai.prompts import Given, split
from penstock_frontend.api.openai.sampling_fields import TokenId

Input: TypeAlias = str | list[str | TokenId | list[TokenId]]
"""A text, texts, token ids, or lists of them."""
_MANY = 2**31


class PoolingFields(TruncationFields, kw_only=True):
    """The common fields of bodies of vLLM's protocol. ``use_activation`` false: the model's bare scores."""

    use_activation: bool | None = None


class PoolingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of everything that was read."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


def normalize_of(normalize: bool | None, use_activation: bool | None) -> bool | None:
    """Whether vectors get length one; None as the model says. vLLM has had both names. Raises InvalidArgument."""
    if None not in (normalize, use_activation) and normalize != use_activation:
        raise InvalidArgument(
            f"normalize is {shown(normalize)} and use_activation is {shown(use_activation)}; they are two names of the same, so "
            "set one",
            field="normalize",
        )
    return use_activation if normalize is None else normalize


def inputs_of(given: Input, *, field: str = "input") -> tuple[Sequence[Given], Sequence[str]]:
    """The inputs of a body and what each is called, none for an empty list. Raises InvalidArgument."""
    try:
        inputs = split(given, _MANY) if given else []
    except InvalidArgument as e:
        raise renamed(e, {"prompt": field}) from e
    single = isinstance(given, str) or all(isinstance(each, int) for each in given)
    return inputs, [field] if single else [f"{field}[{index}]" for index in range(len(inputs))]


def usage_of(prompt_tokens: int) -> PoolingUsage:
    """The counts as they are sent."""
    return PoolingUsage(prompt_tokens=prompt_tokens, total_tokens=prompt_tokens)
