"""What a response's output is made of."""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from penstock_frontend.api.openai.choice_logprobs import ContentLogprob


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """Text of a message. ``logprobs``: where they were asked for."""

    text: str
    annotations: Sequence[str] = ()
    logprobs: Sequence[ContentLogprob] = ()


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """What the model thought."""

    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """What the assistant says."""

    id: str
    status: str
    role: str = "assistant"
    content: Sequence[OutputText]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought before its answer. It is not summed up."""

    id: str
    status: str
    summary: Sequence[str] = ()
    content: Sequence[ReasoningText]
    encrypted_content: None = None


class FunctionCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function. ``arguments``: a JSON object as text. ``namespace``: of a function that is in one."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class CustomCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool. ``input``: a text."""

    id: str
    status: str
    call_id: str
    name: str
    input: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


OutputItem: TypeAlias = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem
Part: TypeAlias = OutputText | ReasoningText
