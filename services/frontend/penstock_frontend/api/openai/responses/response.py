"""A response: its fields, the items of its output, and the events of a streamed one."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from penstock_frontend.api.openai.choice_logprobs import ContentLogprob
from penstock_frontend.api.openai.responses.response_body import FunctionTool, ReasoningBody, TextBody, ToolChoiceBody


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


IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED, CANCELLED = "in_progress", "completed", "incomplete", "failed", "cancelled"


class InputTokensDetails(msgspec.Struct, frozen=True):
    """The part of the input that was cached."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """The part of the output that is reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response is not complete."""

    reason: str


class ResponseError(msgspec.Struct, frozen=True):
    """What a response failed with."""

    code: str
    message: str


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, and what it was asked with. Times are seconds since the Unix epoch."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: Mapping[str, str]
    model: str
    output: Sequence[OutputItem] = ()
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningBody
    service_tier: str = "default"
    store: bool
    temperature: float | None
    text: TextBody
    tool_choice: str | ToolChoiceBody
    tools: Sequence[FunctionTool]
    top_logprobs: int
    top_p: float | None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    kv_transfer_params: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """Not of OpenAI's."""


class DeletedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What is left of a response that was deleted."""

    id: str
    object: str = "response.deleted"
    deleted: bool = True


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """Items of a response's input, or a page of them."""

    object: str = "list"
    data: Sequence[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


# Events. ``sequence_number`` counts them from 0, ``output_index`` the items of the output.


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """What all of them have."""

    type: str
    sequence_number: int


class ResponseEvent(Event, frozen=True, kw_only=True):
    """``response.created``, ``.in_progress``, ``.completed``, ``.incomplete``, ``.failed``: the response as it is now."""

    response: Response


class ItemEvent(Event, frozen=True, kw_only=True):
    """``response.output_item.added`` and ``.done``."""

    output_index: int
    item: OutputItem


class PartEvent(Event, frozen=True, kw_only=True):
    """``response.content_part.added`` and ``.done``."""

    item_id: str
    output_index: int
    content_index: int
    part: Part


class TextDelta(Event, frozen=True, kw_only=True):
    """``response.output_text.delta``."""

    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: Sequence[ContentLogprob] = ()


class TextDone(Event, frozen=True, kw_only=True):
    """``response.output_text.done``."""

    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: Sequence[ContentLogprob] = ()


class ReasoningDelta(Event, frozen=True, kw_only=True):
    """``response.reasoning_text.delta``."""

    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningDone(Event, frozen=True, kw_only=True):
    """``response.reasoning_text.done``."""

    item_id: str
    output_index: int
    content_index: int
    text: str


class ArgumentsDelta(Event, frozen=True, kw_only=True):
    """``response.function_call_arguments.delta``."""

    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Event, frozen=True, kw_only=True):
    """``response.function_call_arguments.done``."""

    item_id: str
    output_index: int
    name: str
    arguments: str


class InputDelta(Event, frozen=True, kw_only=True):
    """``response.custom_tool_call_input.delta``."""

    item_id: str
    output_index: int
    delta: str


class InputDone(Event, frozen=True, kw_only=True):
    """``response.custom_tool_call_input.done``."""

    item_id: str
    output_index: int
    input: str
