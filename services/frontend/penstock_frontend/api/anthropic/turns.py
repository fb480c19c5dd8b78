"""Messages as Anthropic's protocol writes them, to the domain's."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_frontend.api.anthropic.block_texts import TEXTS, result_text, text_of
from penstock_frontend.api.anthropic.images import image_of
from penstock_frontend.api.anthropic.messages_body import (
    BlockBody,
    ConversationBody,
    TurnBody,
    blocks_of,
)
from penstock_frontend.api.anthropic.omitted_thinking import opened
from penstock_frontend.api.openai.response_format import Constraint
from penstock_frontend.api.reasoning_effort import effort_kwargs
from penstock_frontend.call_types import ChatMessage, ContentPart, ToolCall
from penstock_frontend.processing.chat.histories import arguments_text, warn_of_lost_calls
from penstock_frontend.telemetry.call_warnings import WarningKind, warn

_BILLING = "x-anthropic-billing-header"
"""What a block begins with that Anthropic's own clients put into the system's text, different in every call."""


class Turns(NamedTuple):
    """The domain's messages, and what the body calls each."""

    messages: list[ChatMessage]
    places: list[str]


def turns_of(body: ConversationBody) -> Turns:
    """The domain's messages: what the system says, wherever it stands, as the first, since templates look for it there; then the
    turns. Results of tools are messages of their own, before what else the user says with them. Fields of images are relative to
    their turns. Raises InvalidArgument, Unimplemented.
    """
    system, messages, places = _system(body.system, "system"), [], []
    for index, turn in enumerate(body.messages):
        path = f"messages[{index}]"
        match turn.role:
            case "system":
                system += _system(turn.content, f"{path}.content")
                continue
            case "assistant":
                found = _answer(turn, path)
            case "user":
                found = _question(turn, path)
            case role:
                known = "user, assistant, system"
                raise InvalidArgument(f"{path}.role is {quoted(role)}; known: {known}", field=f"{path}.role")
        messages += found
        places += [path] * len(found)
    warn_of_lost_calls(messages, places)
    if system:
        messages.insert(0, ChatMessage(role="system", content="\n".join(system)))
        places.insert(0, "system")
    return Turns(messages, places)


def continues(body: ConversationBody) -> bool:
    """Whether the answer goes on with what the last message begins."""
    return bool(body.messages) and body.messages[-1].role == "assistant"


def template_kwargs(body: ConversationBody) -> dict[str, Any]:
    """Variables of the chat template."""
    effort = body.output_config.effort if body.output_config is not None else None
    thinking = {} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}
    return {**effort_kwargs(effort, "output_config.effort"), **thinking, **(body.chat_template_kwargs or {})}


def format_constraint(body: ConversationBody) -> Constraint | None:
    """What ``output_config.format`` asks of the answer. Raises InvalidArgument."""
    format_ = body.output_config.format if body.output_config is not None else None
    if format_ is None:
        return None
    path = "output_config.format"
    if format_.type != "json_schema":
        raise InvalidArgument(f"{path}.type is {quoted(format_.type)}; known: json_schema", field=f"{path}.type")
    if format_.schema is None:
        raise InvalidArgument(f"{path}.schema is not set", field=f"{path}.schema")
    schema = msgspec.json.encode(format_.schema).decode()
    return Constraint(f"{path}.schema", path, "json_schema", schema)


def _answer(turn: TurnBody, path: str) -> list[ChatMessage]:
    """The assistant's messages: a new one begins behind each result of a tool that Anthropic ran."""
    if isinstance(turn.content, str):
        return [ChatMessage(role="assistant", content=turn.content)]
    found: list[ChatMessage] = []
    said = _Said([], [], [])
    for index, block in enumerate(turn.content):
        place = f"{path}.content[{index}]"
        match block.type:
            case kind if kind in TEXTS:
                said.texts.append(text_of(block, place))
            case "thinking":
                thought = block.thinking or opened(block.signature)
                if block.signature and not thought:
                    warn(
                        WarningKind.HISTORY_LEFT_OUT,
                        place,
                        "is thinking that another server omitted, which only it can read",
                    )
                said.thoughts.append(thought)
            case "redacted_thinking":
                warn(WarningKind.HISTORY_LEFT_OUT, place, "is redacted thinking, which only its author can read")
            case "compaction":
                said.texts.append(block.content if isinstance(block.content, str) else "")
            case "tool_use" | "server_tool_use" | "mcp_tool_use":
                if not block.name:
                    raise InvalidArgument(f"{place}.name is not set", field=f"{place}.name", reason="MISSING_FIELD")
                arguments = arguments_text(block.input, f"{place}.input")
                said.calls.append(ToolCall(id=block.id, name=block.name, arguments=arguments))
            case kind if kind.endswith("_tool_result"):
                found += [said.message(), _hosted_result(block, place)]
                said = _Said([], [], [])
            case kind:
                raise _not_served(kind, place)
    if not found or said.texts or said.thoughts or said.calls:
        found.append(said.message())
    return found


class _Said(NamedTuple):
    """One message of an assistant's in the making."""

    texts: list[str]
    thoughts: list[str]
    calls: list[ToolCall]

    def message(self) -> ChatMessage:
        return ChatMessage(
            role="assistant",
            content="\n".join(self.texts),
            reasoning="\n".join(self.thoughts),
            tool_calls=tuple(self.calls),
        )


def _hosted_result(block: BlockBody, place: str) -> ChatMessage:
    """What a tool gave that Anthropic ran."""
    return ChatMessage(role="tool", content=result_text(block, place), tool_call_id=block.tool_use_id)


def _question(turn: TurnBody, path: str) -> list[ChatMessage]:
    if isinstance(turn.content, str):
        return [ChatMessage(role="user", content=turn.content)]
    parts, results = [], []
    for index, block in enumerate(turn.content):
        place = f"{path}.content[{index}]"
        match block.type:
            case kind if kind == "image" or kind in TEXTS:
                parts.append(_part(block, path, f"content[{index}]"))
            case "tool_result":
                if not block.tool_use_id:
                    field = f"{place}.tool_use_id"
                    raise InvalidArgument(f"{field} is not set", field=field, reason="MISSING_FIELD")
                content = _result(blocks_of(block.content, f"{place}.content"), path, f"content[{index}].content")
                results.append(ChatMessage(role="tool", content=content, tool_call_id=block.tool_use_id))
            case kind:
                raise _not_served(kind, place)
    return [*results, *([ChatMessage(role="user", content=_joined(parts))] if parts or not results else [])]


def _system(content: str | Sequence[BlockBody] | None, path: str) -> list[str]:
    """The system's texts, those about billing left out: no two prompts would begin alike."""
    if content is None or isinstance(content, str):
        return [content] if content else []
    for index, block in enumerate(content):
        if block.type != "text":
            raise _not_served(block.type, f"{path}[{index}]")
    return [block.text for block in content if not block.text.startswith(_BILLING)]


def _result(content: str | Sequence[BlockBody] | None, path: str, place: str) -> str | list[ContentPart]:
    """What a tool gave. ``place``: in its turn, whose path is ``path``."""
    if content is None or isinstance(content, str):
        return content or ""
    return _joined([_part(block, path, f"{place}[{index}]") for index, block in enumerate(content)])


def _part(block: BlockBody, path: str, place: str) -> ContentPart:
    """An image, or a text or what becomes one. Raises Unimplemented for another block."""
    if block.type == "image":
        source = None if isinstance(block.source, str) else block.source
        return ContentPart(type="media", media=image_of(source, path, f"{place}.source"))
    if block.type not in TEXTS:
        raise _not_served(block.type, f"{path}.{place}")
    return ContentPart(type="text", text=text_of(block, f"{path}.{place}"))


def _joined(parts: list[ContentPart]) -> str | list[ContentPart]:
    """One text, where there is nothing but texts."""
    return parts if any(part.media for part in parts) else "\n".join(part.text for part in parts)


def _not_served(kind: str, place: str) -> Unimplemented:
    return Unimplemented(f"{place}.type is {quoted(kind)}, which is not served here", field=f"{place}.type")
