"""The body of a call that makes a response."""

from typing import Any

import msgspec

from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_frontend.api.openai import sampling_fields
from penstock_frontend.api.openai.body_fields import check_range, refuse_fields, shown
from penstock_frontend.api.openai.conversation import MediaFields, MediaIoBody
from penstock_frontend.api.openai.sampling_fields import SamplingFields
from penstock_frontend.call_warnings import WarningKind, warn

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
