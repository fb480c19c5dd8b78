"""The events of a streamed response. ``sequence_number`` counts them from 0, ``output_index`` the items of the output."""

from collections.abc import Sequence

import msgspec

from penstock_frontend.api.openai.choice_logprobs import ContentLogprob
from penstock_frontend.api.openai.responses.items import OutputItem, Part
from penstock_frontend.api.openai.responses.response import Response


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
