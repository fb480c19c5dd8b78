"""A response, and what its fields are."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock_frontend.api.openai.responses.items import OutputItem
from penstock_frontend.api.openai.responses.response_body import FunctionTool, ReasoningBody, TextBody, ToolChoiceBody

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
