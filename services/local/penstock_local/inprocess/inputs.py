"""What callers of an ``LLM`` give: one thing or a list of them, in several forms."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock_common.errors import InvalidArgument, nearest
from penstock_common.types.sampling import OutputKind, SamplingParams
from penstock_frontend.processing.chat import ChatMessage

Prompt = str | Sequence[int]
"""Text, or token ids used as they are."""
Message = Mapping[str, Any]
"""A turn of a conversation: ``{"role": "user", "content": "..."}``."""
Sampling = SamplingParams | Mapping[str, Any] | None
"""How to choose tokens. SamplingParams says everything; a mapping some of its fields, and the rest is the model's own."""


def as_prompts(prompts: Prompt | Sequence[Prompt], *, name: str) -> list[Prompt]:
    """A list of prompts, also of a single one. Raises InvalidArgument naming what is none."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]  # token ids
    listed = list(prompts)
    for index, prompt in enumerate(listed):
        if isinstance(prompt, str):
            continue
        if not isinstance(prompt, Sequence) or not all(isinstance(i, int) and i >= 0 for i in prompt):
            kind = type(prompt).__name__
            raise InvalidArgument(f"{name}[{index}] is a {kind}; it must be text or a list of token ids")
    return listed  # type: ignore[return-value]


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[ChatMessage]]:
    """A list of conversations, also of a single one. Raises InvalidArgument naming the message and what is wrong with it."""
    single = len(messages) > 0 and isinstance(messages[0], Mapping)
    conversations: Sequence[Any] = [messages] if single else messages
    return [
        [_message(message, f"conversations[{index}].messages[{turn}]") for turn, message in enumerate(conversation)]
        for index, conversation in enumerate(conversations)
    ]


def _message(message: Message, name: str) -> ChatMessage:
    try:
        return msgspec.convert(message, ChatMessage)
    except msgspec.ValidationError as e:
        raise InvalidArgument(f"{name}: {e}", field=name) from None


def as_sampling(sampling: Sampling | Sequence[Sampling], count: int) -> list[dict[str, Any]]:
    """The fields that are set, for each of ``count`` inputs. Raises InvalidArgument naming the field."""
    if sampling is None or isinstance(sampling, SamplingParams | Mapping):
        return [_fields(sampling, "sampling_params")] * count
    if len(sampling) != count:
        raise InvalidArgument(
            f"sampling_params has {len(sampling)} entries for {count} inputs; give one for all, or one each"
        )
    return [_fields(each, f"sampling_params[{index}]") for index, each in enumerate(sampling)]


def _fields(sampling: Sampling, name: str) -> dict[str, Any]:
    """Checked by type, tuples made of lists. What is None the model and the server's own defaults decide."""
    given = _given(sampling, name)
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    try:
        checked = msgspec.convert(msgspec.to_builtins(given), SamplingParams)
    except msgspec.ValidationError as e:
        raise InvalidArgument(f"{name}: {e}", field=name) from None
    return {**{field: getattr(checked, field) for field in given}, "output_kind": OutputKind.FINAL}


def _given(sampling: Sampling, name: str) -> dict[str, Any]:
    if sampling is None:
        return {}
    if isinstance(sampling, SamplingParams):
        values: Mapping[str, Any] = {field: getattr(sampling, field) for field in sampling.__struct_fields__}
    else:
        values = sampling
        for field in values:
            if field not in SamplingParams.__struct_fields__:
                hint = nearest(str(field), SamplingParams.__struct_fields__)
                raise InvalidArgument(f"{name}: there is no {field!r}{hint}", field=name)
    return {field: value for field, value in values.items() if value is not None}
