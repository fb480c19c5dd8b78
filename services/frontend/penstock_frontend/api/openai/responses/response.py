"""Types of the Responses API: the request body, the response, its output items, and its events."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_frontend.api.openai import sampling_fields
from penstock_frontend.api.openai.body_fields import check_range, refuse_fields, shown
from penstock_frontend.api.openai.choice_logprobs import ContentLogprob
from penstock_frontend.api.openai.conversation import MediaFields, MediaIoBody
from penstock_frontend.api.openai.sampling_fields import SamplingFields
from penstock_frontend.call_warnings import WarningKind, warn

# The types below are the body of a call that creates a response.

_INT32_MAX = 2**31 - 1
_MOST_METADATA = 16
_INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")
_HOSTED = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""Values of ``include`` that ask for items that this server never returns."""


class InputPart(MediaFields, frozen=True, kw_only=True, omit_defaults=True):
    """A part of an item: text, which has several field names, or media."""

    type: str
    text: str = ""
    refusal: str = ""


class InputItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An input item: a message, a tool call, a tool result, or reasoning. Output items of earlier responses are
    accepted too.

    Items of tools that OpenAI runs have additional fields of any form. These fields become text.
    """

    type: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: Any = None
    output: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None
    action: Any = None
    approval_request_id: str | None = None
    approve: bool | None = None
    code: str | None = None
    error: Any = None
    operation: Any = None
    outputs: Any = None
    queries: Any = None
    reason: str | None = None
    result: Any = None
    results: Any = None
    server_label: str | None = None
    tools: Any = None


class ToolFormatBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Format of the input of a custom tool. The format is ``text``, or ``grammar`` with the ``syntax`` ``lark`` or
    ``regex``.
    """

    type: str
    syntax: str = ""
    definition: str = ""


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of a body: a function, a custom tool, or a namespace of tools. Tools of other types are left out.

    If a call is required, the function's schema is enforced even if ``strict`` is false.
    """

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: ToolFormatBody | msgspec.UnsetType | None = msgspec.UNSET
    tools: "list[FunctionTool] | msgspec.UnsetType | None" = msgspec.UNSET


class AllowedToolBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool that the tool choice allows the model to call. A tool that OpenAI hosts has only a type."""

    type: str
    name: str = ""
    namespace: str | None = None


class ToolChoiceBody(AllowedToolBody, frozen=True, kw_only=True, omit_defaults=True):
    """Tool choice in the form of an object, which is the tool that must be called.

    With the type ``allowed_tools``, the object has the tools that may be called, and ``mode`` says whether one of them
    must be called.
    """

    mode: str | None = None
    tools: list[AllowedToolBody] | None = None


class FormatBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Format of the output text: ``text``, ``json_object``, or ``json_schema``. A schema is always enforced."""

    type: str
    name: str = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Settings for the output text."""

    format: FormatBody | None = None
    verbosity: str | None = None


class ReasoningBody(msgspec.Struct, frozen=True, kw_only=True):
    """Reasoning effort, which becomes a variable of the chat template. ``none`` turns reasoning off, if the template
    supports this.
    """

    effort: str | None = None
    summary: str | None = None


class ResponseBody(SamplingFields, kw_only=True):
    """Request body of ``/v1/responses``. ``input`` is a text, or a list of items. The sampling fields have vLLM's
    names.
    """

    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    text: TextBody | None = None
    reasoning: ReasoningBody | None = None
    include: list[str] | None = None
    include_reasoning: bool | None = None
    top_logprobs: int | None = None
    user: str | None = None
    background: bool | None = None
    truncation: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: MediaIoBody | None = None

    @property
    def with_logprobs(self) -> bool:
        """True if the request asks for the log-probabilities of the text."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())


def check(body: ResponseBody) -> None:
    """Check the fields of the body that the conversion to domain types does not check. Raises InvalidArgument and
    Unimplemented.
    """
    refuse_fields(body, "prompt_logprobs", "truncate_prompt_tokens", "return_token_ids", "add_special_tokens")
    sampling_fields.check(body)
    if body.truncation == "auto":
        warn(
            WarningKind.HINT_IGNORED, "truncation", "is 'auto', but a conversation that is too long is refused, not cut"
        )
    for name, served in (("background", (False,)), ("truncation", ("disabled", "auto")), ("n", (1,))):
        if (value := getattr(body, name)) not in (None, *served):
            raise Unimplemented(f"{name} is {shown(value)}; only {shown(served[0])} is supported", field=name)
    check_range("top_logprobs", body.top_logprobs, 0, _INT32_MAX)
    for index, name in enumerate(body.include or ()):
        if name not in (*_INCLUDED, *_HOSTED):
            field = f"include[{index}]"
            raise Unimplemented(f"{field} is {quoted(name)}; known: {', '.join(_INCLUDED)}", field=field)
    if body.reasoning is not None and body.reasoning.summary not in (None, "auto"):
        warn(WarningKind.HINT_IGNORED, "reasoning.summary", "has no effect: reasoning is returned in full")
    if len(body.metadata or ()) > _MOST_METADATA:
        raise InvalidArgument(
            f"metadata has {len(body.metadata or ())} entries; it must have at most {_MOST_METADATA}", field="metadata"
        )


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """Text of a message item. ``logprobs`` is set if the request asks for log-probabilities."""

    text: str
    annotations: Sequence[str] = ()
    logprobs: Sequence[ContentLogprob] = ()


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Text of a reasoning item."""

    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """Output item with a message of the assistant."""

    id: str
    status: str
    role: str = "assistant"
    content: Sequence[OutputText]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """Output item with the reasoning before the answer. The item has no summary."""

    id: str
    status: str
    summary: Sequence[str] = ()
    content: Sequence[ReasoningText]
    encrypted_content: None = None


class FunctionCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """Output item with a function call. ``arguments`` is a JSON object as text. ``namespace`` is set if the function is
    in a namespace.
    """

    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class CustomCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """Output item with a call of a custom tool. ``input`` is a text."""

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
    """Details about the number of input tokens: how many were cached."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Details about the number of output tokens: how many are reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Reason why a response is incomplete."""

    reason: str


class ResponseError(msgspec.Struct, frozen=True):
    """The error of a failed response."""

    code: str
    message: str


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A response, with the settings of its request. All times are in seconds since the Unix epoch."""

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
    """KV transfer parameters of the output. This field is not in OpenAI's API."""


class DeletedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Confirmation that a response was deleted."""

    id: str
    object: str = "response.deleted"
    deleted: bool = True


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """Input items of a response, or a page of them."""

    object: str = "list"
    data: Sequence[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


# The types below are streaming events. ``sequence_number`` counts the events from 0, and ``output_index`` counts the
# output items from 0.


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of streaming events, with the fields that all events have."""

    type: str
    sequence_number: int


class ResponseEvent(Event, frozen=True, kw_only=True):
    """Events ``response.created``, ``.in_progress``, ``.completed``, ``.incomplete`` and ``.failed``, which have the
    current state of the response.
    """

    response: Response


class ItemEvent(Event, frozen=True, kw_only=True):
    """Events ``response.output_item.added`` and ``.done``, which mark the start and the end of an output item."""

    output_index: int
    item: OutputItem


class PartEvent(Event, frozen=True, kw_only=True):
    """Events ``response.content_part.added`` and ``.done``, which mark the start and the end of a part of an item."""

    item_id: str
    output_index: int
    content_index: int
    part: Part


class TextDelta(Event, frozen=True, kw_only=True):
    """Event ``response.output_text.delta``, which has the next piece of the text."""

    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: Sequence[ContentLogprob] = ()


class TextDone(Event, frozen=True, kw_only=True):
    """Event ``response.output_text.done``, which has the complete text."""

    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: Sequence[ContentLogprob] = ()


class ReasoningDelta(Event, frozen=True, kw_only=True):
    """Event ``response.reasoning_text.delta``, which has the next piece of the reasoning."""

    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningDone(Event, frozen=True, kw_only=True):
    """Event ``response.reasoning_text.done``, which has the complete reasoning."""

    item_id: str
    output_index: int
    content_index: int
    text: str


class ArgumentsDelta(Event, frozen=True, kw_only=True):
    """Event ``response.function_call_arguments.delta``, which has the next piece of the arguments of a function call."""

    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Event, frozen=True, kw_only=True):
    """Event ``response.function_call_arguments.done``, which has the complete arguments of a function call."""

    item_id: str
    output_index: int
    name: str
    arguments: str


class InputDelta(Event, frozen=True, kw_only=True):
    """Event ``response.custom_tool_call_input.delta``, which has the next piece of the input of a custom tool's call."""

    item_id: str
    output_index: int
    delta: str


class InputDone(Event, frozen=True, kw_only=True):
    """Event ``response.custom_tool_call_input.done``, which has the complete input of a custom tool's call."""

    item_id: str
    output_index: int
    input: str
