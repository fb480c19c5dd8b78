"""A response: the body that asks for it, its fields, the items of its output, and its events."""

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

# The body of a call that makes a response.

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
"""More of items that answers of this server do not have."""


class InputPart(MediaFields, frozen=True, kw_only=True, omit_defaults=True):
    """A part of an item: text, under one of its names, or a medium."""

    type: str
    text: str = ""
    refusal: str = ""


class InputItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An item of the input: a message, a call of a tool, what one gave, or reasoning. Items of outputs are taken as well. Items
    of tools that OpenAI runs have fields of any form, which become text.
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
    """The form of a custom tool's input: ``text``, or ``grammar`` with its ``syntax``, ``lark`` or ``regex``."""

    type: str
    syntax: str = ""
    definition: str = ""


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call, a custom tool, or a namespace of them. Tools of other types are left out. Schemas of
    tools that must be called are enforced, whatever ``strict`` says.
    """

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: ToolFormatBody | msgspec.UnsetType | None = msgspec.UNSET
    tools: "list[FunctionTool] | msgspec.UnsetType | None" = msgspec.UNSET


class AllowedToolBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool that may be called. A hosted tool has a type alone."""

    type: str
    name: str = ""
    namespace: str | None = None


class ToolChoiceBody(AllowedToolBody, frozen=True, kw_only=True, omit_defaults=True):
    """The tool that must be called, or with the type ``allowed_tools`` those that may be, and whether one must be."""

    mode: str | None = None
    tools: list[AllowedToolBody] | None = None


class FormatBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form of the text: ``text``, ``json_object``, or ``json_schema``, which is always enforced."""

    type: str
    name: str = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What text is to be like."""

    format: FormatBody | None = None
    verbosity: str | None = None


class ReasoningBody(msgspec.Struct, frozen=True, kw_only=True):
    """How much the model is to reason: a variable of its chat template; ``none``: not at all, where the template knows that."""

    effort: str | None = None
    summary: str | None = None


class ResponseBody(SamplingFields, kw_only=True):
    """The body. ``input``: a text, or items. The common fields of completions are vLLM's here."""

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
        """Whether the text's log-probabilities are asked for."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())


def check(body: ResponseBody) -> None:
    """Raise InvalidArgument or Unimplemented for what can be said of the body without the domain."""
    refuse_fields(body, "prompt_logprobs", "truncate_prompt_tokens", "return_token_ids", "add_special_tokens")
    sampling_fields.check(body)
    if body.truncation == "auto":
        warn(
            WarningKind.HINT_IGNORED, "truncation", "is 'auto', but a conversation that is too long is refused, not cut"
        )
    for name, served in (("background", (False,)), ("truncation", ("disabled", "auto")), ("n", (1,))):
        if (value := getattr(body, name)) not in (None, *served):
            raise Unimplemented(f"{name} is {shown(value)}; only {shown(served[0])} is served", field=name)
    check_range("top_logprobs", body.top_logprobs, 0, _INT32_MAX)
    for index, name in enumerate(body.include or ()):
        if name not in (*_INCLUDED, *_HOSTED):
            field = f"include[{index}]"
            raise Unimplemented(f"{field} is {quoted(name)}; known: {', '.join(_INCLUDED)}", field=field)
    if body.reasoning is not None and body.reasoning.summary not in (None, "auto"):
        warn(WarningKind.HINT_IGNORED, "reasoning.summary", "has no effect: reasoning is shown whole")
    if len(body.metadata or ()) > _MOST_METADATA:
        raise InvalidArgument(
            f"metadata has {len(body.metadata or ())} entries; it may have {_MOST_METADATA}", field="metadata"
        )


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
