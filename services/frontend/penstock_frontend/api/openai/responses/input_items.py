"""A response's input and tools to the domain's, and its output to what a later response goes on with."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_frontend.api.custom_inputs import input_arguments
from penstock_frontend.api.openai import sampling_fields
from penstock_frontend.api.openai.conversation import CONVERSATION
from penstock_frontend.api.openai.media_fields import MediaOptions, is_media, media_of
from penstock_frontend.api.openai.response_format import Constraint
from penstock_frontend.api.openai.responses import tool_items
from penstock_frontend.api.openai.responses.response_body import (
    FormatBody,
    InputItem,
    InputPart,
    ResponseBody,
)
from penstock_frontend.api.reasoning_effort import effort_kwargs
from penstock_frontend.api.served_tools import ChosenTools, ServedTools
from penstock_frontend.call_types import ChatMessage, ContentPart, ToolCall
from penstock_frontend.processing.chat.blocks import Block, BlockKind

_TEXT_TYPES = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


class Turns(NamedTuple):
    """The domain's messages, and the item that each begins with, as errors call it."""

    messages: list[ChatMessage]
    places: list[str]


def turns_of(given: str | Sequence[InputItem], options: MediaOptions) -> Turns:
    """The input's. What an assistant thought, said and called, one behind the other, is one message. Fields of media are relative
    to their items.

    Raises InvalidArgument, Unimplemented.
    """
    if isinstance(given, str):
        return Turns([ChatMessage(role="user", content=given)], ["input"])
    turns, places = _Turns(), []
    for index, item in enumerate(given):
        before = turns.count
        _add(turns, item, f"input[{index}]", options)
        places += [f"input[{index}]"] * (turns.count - before)
    return Turns(turns.all(), places)


def answered(blocks: Iterable[Block], tools: ServedTools) -> list[ChatMessage]:
    """What an assistant has answered, as messages. ``tools``: those that it had."""
    turns = _Turns()
    for block in blocks:
        if block.kind is BlockKind.REASONING:
            turns.thought(block.text)
        elif block.kind is BlockKind.TEXT:
            turns.said(block.text)
        else:
            tool = tools.called(block.name)
            arguments = input_arguments(block.text) if tool is not None and tool.custom else block.text
            turns.called(ToolCall(id=block.call_id, name=block.name, arguments=arguments))
    return turns.all()


def template_kwargs(body: ResponseBody) -> dict[str, Any]:
    """Variables of the chat template."""
    effort = body.reasoning.effort if body.reasoning else None
    return {**effort_kwargs(effort, "reasoning.effort"), **(body.chat_template_kwargs or {})}


def format_constraint(format_: FormatBody | None) -> Constraint | None:
    """What ``text.format`` asks of the output. Raises InvalidArgument."""
    head, field = "text.format", "text.format.schema"
    match format_.type if format_ else "text":
        case "text":
            return None
        case "json_object":
            return Constraint(head, head, "json_object", True)
        case "json_schema" if format_ and format_.schema is not None:
            return Constraint(field, head, "json_schema", msgspec.json.encode(format_.schema).decode())
        case "json_schema":
            raise InvalidArgument(f"{field} is not set", field=field)
        case kind:
            raise InvalidArgument(
                f"text.format.type is {quoted(kind)}; known: text, json_object, json_schema", field="text.format.type"
            )


def names(body: ResponseBody, places: Sequence[str], before: int, chosen: ChosenTools) -> Mapping[str, str]:
    """Our names of fields to the client's, for errors. ``places``: of the input's messages, which stand behind ``before``
    others; ``chosen``: the tools.
    """
    own = format_constraint(body.text.format if body.text is not None else None)
    return {
        **{f"messages[{before + index}]": place for index, place in enumerate(places)},
        **CONVERSATION,
        **chosen.names,
        "text": "input",
        "prompt": "input",
        "messages": "input",
        "sampling_params.max_tokens": "max_output_tokens",
        **sampling_fields.names(body, own),
    }


class _Turns:
    """Messages in the making. The assistant's last one takes more, in the order in which templates write it."""

    def __init__(self) -> None:
        self._done: list[ChatMessage] = []
        self._open: ChatMessage | None = None
        self._noted = False  # whether the open message has nothing but notes yet

    def all(self) -> list[ChatMessage]:
        self._close()
        return self._done

    @property
    def count(self) -> int:
        return len(self._done) + (self._open is not None)

    def add(self, message: ChatMessage) -> None:
        self._close()
        self._done.append(message)

    def thought(self, text: str) -> None:
        if self._open is None or self._open.content is not None or self._open.tool_calls:
            self._begin()
        self._change(reasoning=(self._open.reasoning if self._open else "") + text)

    def noted(self, text: str) -> None:
        """Add what a tool left between what the assistant says."""
        if self._open is None or self._open.tool_calls or not isinstance(self._open.content, str | None):
            self._begin()
        said = self._open.content if self._open is not None else None
        self._change(content=f"{said}\n{text}" if said else text)
        self._noted = True

    def said(self, content: str | Sequence[ContentPart] | None) -> None:
        if self._noted and self._open is not None and isinstance(self._open.content, str):
            if not isinstance(content, str | None):
                content = [ContentPart(type="text", text=self._open.content), *content]
            elif content:
                content = f"{self._open.content}\n{content}"
            self._noted = False
            self._change(content=content)
            return
        if self._open is None or self._open.content is not None or self._open.tool_calls:
            self._begin()
        self._change(content=content)

    def called(self, call: ToolCall) -> None:
        if self._open is None:
            self._begin()
        self._change(tool_calls=[*(self._open.tool_calls if self._open else ()), call])

    def _begin(self) -> None:
        self._close()
        self._noted = False
        self._open = ChatMessage(role="assistant")

    def _change(self, **fields: Any) -> None:
        self._open = msgspec.structs.replace(self._open or ChatMessage(role="assistant"), **fields)

    def _close(self) -> None:
        if self._open is not None:
            self._done.append(self._open)
            self._open = None


def _add(turns: _Turns, item: InputItem, path: str, options: MediaOptions) -> None:
    match item.type or "message":
        case "message":
            if item.role is None:
                raise _missing(f"{path}.role")
            content = _content(item.content, path, "content", options)
            if item.role == "assistant":
                turns.said(content)
            else:
                turns.add(ChatMessage(role=item.role, content=content))
        case kind if kind in tool_items.CALLS:
            turns.called(tool_items.call_of(item, path))
        case kind if kind in tool_items.OUTPUTS:
            call_id = item.call_id or item.id
            if not call_id:
                raise _missing(f"{path}.call_id")
            output = _content(tool_items.output_of(item, path), path, "output", options)
            turns.add(ChatMessage(role="tool", content=output, tool_call_id=call_id))
        case "reasoning":
            parts = item.content or item.summary or ()
            if thoughts := parts if isinstance(parts, str) else "".join(part.text for part in parts):
                turns.thought(thoughts)
            elif item.encrypted_content:
                tool_items.warn_of_secret(item, path)
        case kind if kind in tool_items.TEXTS:
            turns.noted(tool_items.text_of(item, path))
        case kind if kind in tool_items.SECRETS:
            tool_items.warn_of_secret(item, path)
        case kind:
            known = ", ".join(["message", "reasoning", *tool_items.CALLS, *tool_items.OUTPUTS, *tool_items.TEXTS])
            raise Unimplemented(f"{path}.type is {quoted(kind)}; known: {known}", field=f"{path}.type")


def _content(
    content: str | Sequence[InputPart] | None, path: str, name: str, options: MediaOptions
) -> str | list[ContentPart]:
    """Text, or parts of text and media. Raises Unimplemented for other parts, and what ``media_of`` raises."""
    if content is None or isinstance(content, str):
        return content or ""
    return [_part(part, path, f"{name}[{index}]", options) for index, part in enumerate(content)]


def _part(part: InputPart, path: str, place: str, options: MediaOptions) -> ContentPart:
    """``place``: of the part in its item."""
    if is_media(part.type):
        media = media_of(part.type, part, f"{path}.{place}", options)
        relative = msgspec.structs.replace(media, field=media.field.removeprefix(f"{path}."))
        return ContentPart(type="media", media=relative)
    if part.type not in _TEXT_TYPES:
        field = f"{path}.{place}.type"
        raise Unimplemented(f"{field} is {quoted(part.type)}; known: input_text, input_image", field=field)
    return ContentPart(type="text", text=part.text or part.refusal)


def _missing(field: str) -> InvalidArgument:
    return InvalidArgument(f"{field} is not set", field=field, reason="MISSING_FIELD")
