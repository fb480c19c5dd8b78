"""The bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from typing import Any

import msgspec

from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_frontend.api.openai import sampling_fields
from penstock_frontend.api.openai.body_fields import check_range, refuse_fields, shown
from penstock_frontend.api.openai.errors import undecodable
from penstock_frontend.api.openai.sampling_fields import SamplingFields

_INT32_MAX = 2**31 - 1
_THINKING = ("enabled", "adaptive", "disabled")


class SourceBody(msgspec.Struct, frozen=True, kw_only=True):
    """What an image is: ``base64`` with its type and file, or ``url``. Documents are ``text``, or ``content``: blocks of it."""

    type: str
    media_type: str = ""
    data: str = ""
    url: str = ""
    content: Any = None


class BlockBody(msgspec.Struct, frozen=True, kw_only=True):
    """A block of a message's content. ``signature``: has the thinking of a block that omits it."""

    type: str
    text: str = ""
    thinking: str = ""
    signature: str = ""
    id: str = ""
    name: str = ""
    input: Any = None
    tool_use_id: str = ""
    content: Any = None
    is_error: bool | None = None
    source: SourceBody | str | None = None
    title: str | None = None
    context: str | None = None
    tool_name: str = ""


class TurnBody(msgspec.Struct, frozen=True, kw_only=True):
    """A turn."""

    role: str
    content: str | list[BlockBody]


class ClientToolBody(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the client runs. ``type``: null or ``custom``; tools that Anthropic runs or defines have others, and are left
    out.
    """

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolUseChoiceBody(msgspec.Struct, frozen=True, kw_only=True):
    """``auto``, ``any``, ``none``, or ``tool`` with its name."""

    type: str
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model thinks first, where its template lets a client say so, and for how many tokens at most. ``display``:
    ``omitted`` hides the thinking in its signature.
    """

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class AnswerFormatBody(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the answer: ``json_schema``."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfigBody(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer is to be like. ``effort`` is a variable of the chat template."""

    effort: str | None = None
    format: AnswerFormatBody | None = None


class ConversationBody(SamplingFields, kw_only=True):
    """What both bodies have. The common fields of completions are vLLM's here, and change no count."""

    messages: list[TurnBody]
    system: str | list[BlockBody] | None = None
    tools: list[ClientToolBody] | None = None
    tool_choice: ToolUseChoiceBody | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfigBody | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(ConversationBody, kw_only=True):
    """The body of a call for a message."""

    max_tokens: int


def check(body: ConversationBody) -> None:
    """Raise InvalidArgument or Unimplemented for what can be said of the body without the domain."""
    refuse_fields(
        body,
        "prompt_logprobs",
        "truncate_prompt_tokens",
        "return_token_ids",
        "add_special_tokens",
        "kv_transfer_params",
    )
    sampling_fields.check(body)
    if body.n not in (None, 1):
        raise Unimplemented(f"n is {shown(body.n)}; only 1 is served", field="n")
    if body.thinking is not None:
        if body.thinking.type not in _THINKING:
            raise Unimplemented(
                f"thinking.type is {quoted(body.thinking.type)}; known: {', '.join(_THINKING)}", field="thinking.type"
            )
        budget = body.thinking.budget_tokens
        check_range("thinking.budget_tokens", budget, 1, _INT32_MAX)
        if None not in (budget, body.thinking_token_budget) and budget != body.thinking_token_budget:
            raise InvalidArgument(
                f"thinking.budget_tokens is {budget} and thinking_token_budget is {body.thinking_token_budget}; they are "
                "two names of the same, so set one",
                field="thinking.budget_tokens",
            )
        if budget is not None and body.thinking.type == "disabled":
            raise InvalidArgument(
                f"thinking.budget_tokens is {budget} beside thinking.type 'disabled'; leave it out, or set thinking.type to "
                "'enabled'",
                field="thinking.budget_tokens",
            )
    if isinstance(body, MessagesBody):
        check_range("max_tokens", body.max_tokens, 1, _INT32_MAX)


def blocks_of(content: Any, path: str) -> str | list[BlockBody] | None:
    """The content of a block as blocks; of tools that Anthropic runs it has another form. Raises InvalidArgument."""
    try:
        return msgspec.convert(content, str | list[BlockBody] | None)
    except msgspec.ValidationError as e:
        raise undecodable(e, path) from None
