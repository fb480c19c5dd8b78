"""What callers of an ``LLM`` give: one thing or several, in several forms."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from penstock_common.errors import InvalidArgument, nearest
from penstock_common.types.sampling import OutputKind, SamplingParams
from penstock_frontend.call_types import ChatMessage

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, or token ids used as they are; or either as ``{"prompt": text}``, ``{"prompt_token_ids": ids}``."""
Message = Mapping[str, Any]
"""A turn of a conversation: ``{"role": "user", "content": "..."}``."""
Sampling = SamplingParams | Mapping[str, Any] | None
"""How to choose tokens. SamplingParams says everything; a mapping some of its fields, and the rest is the model's own."""

_A_PROMPT = "a prompt is text or a list of token ids"
_A_CONVERSATION = 'a conversation is a list of messages, as [{"role": "user", "content": "..."}]'


def as_prompts(prompts: Prompt | Iterable[Prompt], *, name: str) -> list[str | Sequence[int]]:
    """A list of prompts, also of a single one, and of what can be gone through. Raises InvalidArgument naming what is none."""
    if isinstance(prompts, str | Mapping):
        return [_prompt(prompts, name)]
    listed = _listed(prompts, name, _A_PROMPT)
    if listed and _is_int(listed[0]):
        return [_prompt(listed, name)]
    return [_prompt(prompt, f"{name}[{index}]") for index, prompt in enumerate(listed)]


def _prompt(prompt: object, name: str) -> str | Sequence[int]:
    if isinstance(prompt, Mapping):
        return _prompt_of_mapping(prompt, name)
    if isinstance(prompt, str):
        return prompt
    ids = _listed(prompt, name, _A_PROMPT)
    for index, token in enumerate(ids):
        if not _is_int(token) or token < 0:
            raise InvalidArgument(f"{name}[{index}] is {token!r}; token ids are integers from 0 on", field=name)
    return ids


def _prompt_of_mapping(prompt: Mapping[str, Any], name: str) -> str | Sequence[int]:
    """The one thing in it. Other keys mean what is not done here, and are refused."""
    forms = ("prompt", "prompt_token_ids")
    if set(prompt) == {"prompt"} and isinstance(prompt["prompt"], str):
        return prompt["prompt"]
    if set(prompt) == {"prompt_token_ids"} and not isinstance(prompt["prompt_token_ids"], str | Mapping):
        return _prompt(prompt["prompt_token_ids"], f"{name}.prompt_token_ids")
    keys = ", ".join(map(repr, prompt)) or "nothing"
    raise InvalidArgument(f"{name} is a mapping with {keys}; it must have {' or '.join(forms)} alone", field=name)


def as_conversations(messages: Iterable[Message] | Iterable[Iterable[Message]]) -> list[list[ChatMessage]]:
    """A list of conversations, also of a single one. Raises InvalidArgument naming the message and what is wrong with it."""
    listed = _listed(messages, "messages", _A_CONVERSATION)
    conversations = [listed] if listed and isinstance(listed[0], Mapping) else listed
    return [
        [
            _message(message, f"conversations[{index}].messages[{turn}]")
            for turn, message in enumerate(_listed(conversation, f"conversations[{index}]", _A_CONVERSATION))
        ]
        for index, conversation in enumerate(conversations)
    ]


def _listed(several: object, name: str, wanted: str) -> list[Any]:
    """Whatever can be gone through as a list: a generator or a column of a table, too. Text, bytes and mappings are one thing."""
    if not isinstance(several, Iterable) or isinstance(several, str | bytes | bytearray | Mapping):
        kind = "None" if several is None else f"of type {type(several).__name__}"
        raise InvalidArgument(f"{name} is {kind}; {wanted}", field=name)
    return list(several)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _message(message: Message, name: str) -> ChatMessage:
    try:
        return msgspec.convert(message, ChatMessage)
    except msgspec.ValidationError as e:
        raise InvalidArgument(f"{name}: {e}", field=name) from None


def as_sampling(sampling: Sampling | Iterable[Sampling], count: int) -> list[dict[str, Any]]:
    """The fields that are set, for each of ``count`` inputs. Raises InvalidArgument naming the field."""
    if sampling is None or isinstance(sampling, SamplingParams | Mapping):
        return [_fields(sampling, "sampling_params")] * count
    listed = _listed(
        sampling, "sampling_params", "it must be SamplingParams, a mapping of its fields, or one for each input"
    )
    if len(listed) != count:
        raise InvalidArgument(
            f"sampling_params has {len(listed)} entries for {count} inputs; give one for all, or one each"
        )
    return [_fields(each, f"sampling_params[{index}]") for index, each in enumerate(listed)]


def _fields(sampling: object, name: str) -> dict[str, Any]:
    """Checked by type, tuples made of lists. What is None the model and the server's own defaults decide."""
    given = _given(sampling, name)
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    try:
        checked = msgspec.convert(msgspec.to_builtins(given), SamplingParams)
    except msgspec.ValidationError as e:
        raise InvalidArgument(f"{name}: {e}", field=name) from None
    return {**{field: getattr(checked, field) for field in given}, "output_kind": OutputKind.FINAL}


def _given(sampling: object, name: str) -> dict[str, Any]:
    if sampling is None:
        return {}
    if isinstance(sampling, SamplingParams):
        values: Mapping[str, Any] = {field: getattr(sampling, field) for field in sampling.__struct_fields__}
    elif not isinstance(sampling, Mapping):
        kind = type(sampling).__name__
        raise InvalidArgument(
            f"{name} is of type {kind}; it must be SamplingParams or a mapping of its fields", field=name
        )
    else:
        values = sampling
        for field in values:
            if field not in SamplingParams.__struct_fields__:
                hint = nearest(str(field), SamplingParams.__struct_fields__)
                raise InvalidArgument(f"{name}: there is no {field!r}{hint}", field=name)
    return {field: value for field, value in values.items() if value is not None}
