"""What the bodies of calls for vectors have in common: the inputs, and fields that are not served."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from penstock_common.errors import InvalidArgument
from penstock_frontend.api.openai.body_fields import refuse_fields
from penstock_frontend.api.openai.context import ContextFields
from penstock_frontend.api.openai.errors import renamed
from penstock_frontend.api.openai.prompts import Given, split
from penstock_frontend.api.openai.sampling_fields import TokenId

Input: TypeAlias = str | list[str | TokenId | list[TokenId]]
"""A text, texts, token ids, or lists of them."""
_MANY = 2**31
_REFUSED = {
    "truncate_prompt_tokens": "",
    "mm_processor_kwargs": "",
    "messages": "input",
    "chat_template": "",
    "softmax": "use_activation",
    "activation": "use_activation",
}
_OF_INPUT = {"pooling_params.": ""}


class PoolingFields(ContextFields, kw_only=True):
    """The common fields of bodies of vLLM's protocol. ``use_activation`` false: the model's bare scores."""

    use_activation: bool | None = None
    truncate_prompt_tokens: Any = None
    mm_processor_kwargs: Any = None
    messages: Any = None
    chat_template: Any = None
    softmax: Any = None
    activation: Any = None


class PoolingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of everything that was read."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


def check(body: PoolingFields) -> None:
    """Raise Unimplemented for a field that is known and not served."""
    refuse_fields(body, _REFUSED)


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
