"""Messages and tools as Anthropic's protocol writes them, to the domain's."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_frontend.api.anthropic.images import image_of
from penstock_frontend.api.anthropic.messages_body import (
    BlockBody,
    ClientToolBody,
    ConversationBody,
    ToolUseChoiceBody,
    TurnBody,
)
from penstock_frontend.api.openai.response_format import Constraint
from penstock_frontend.call_types import ChatMessage, ContentPart, Tool, ToolCall
from penstock_frontend.processing.chat.tool_choice import named_choice

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
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
                found = [_answer(turn, path)]
            case "user":
                found = _question(turn, path)
            case role:
                known = "user, assistant, system"
                raise InvalidArgument(f"{path}.role is {quoted(role)}; known: {known}", field=f"{path}.role")
        messages += found
        places += [path] * len(found)
    if system:
        messages.insert(0, ChatMessage(role="system", content="\n".join(system)))
        places.insert(0, "system")
    return Turns(messages, places)


def continues(body: ConversationBody) -> bool:
    """Whether the answer goes on with what the last message begins."""
    return bool(body.messages) and body.messages[-1].role == "assistant"


def tools_of(bodies: Sequence[ClientToolBody] | None) -> list[Tool]:
    """The domain's tools. Raises Unimplemented for those that the client does not run."""
    for index, body in enumerate(bodies or ()):
        if body.type not in (None, "custom"):
            field = f"tools[{index}].type"
            raise Unimplemented(f"{field} is {quoted(body.type)}; only 'custom' is served", field=field)
    return [
        Tool(name=body.name, description=body.description or "", parameters=body.input_schema) for body in bodies or ()
    ]


def choice_of(choice: ToolUseChoiceBody | None, *, tools: bool) -> tuple[str, str]:
    """The domain's ``tool_choice`` and ``named_tool``. Without a choice it is ``auto``, without tools ``none``."""
    if choice is None:
        return ("auto" if tools else "none"), ""
    if choice.type == "tool":
        return named_choice(choice.name, field="tool_choice.name")
    if choice.type not in _CHOICES:
        known = ", ".join([*_CHOICES, "tool"])
        raise InvalidArgument(f"tool_choice.type is {quoted(choice.type)}; known: {known}", field="tool_choice.type")
    if choice.type == "any" and not tools:
        raise InvalidArgument("tool_choice.type is 'any', but there are no tools; set tools", field="tool_choice.type")
    return _CHOICES[choice.type], ""


def template_kwargs(body: ConversationBody) -> dict[str, Any]:
    """Variables of the chat template."""
    kwargs = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        kwargs.setdefault("enable_thinking", body.thinking.type != "disabled")
    if body.output_config is not None and body.output_config.effort is not None:
        kwargs.setdefault("reasoning_effort", body.output_config.effort)
    return kwargs


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


def _answer(turn: TurnBody, path: str) -> ChatMessage:
    if isinstance(turn.content, str):
        return ChatMessage(role="assistant", content=turn.content)
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(turn.content):
        place = f"{path}.content[{index}]"
        match block.type:
            case "text":
                texts.append(block.text)
            case "thinking":
                thoughts.append(block.thinking)
            case "redacted_thinking":
                pass  # what nobody but who made it can read
            case "tool_use":
                if not block.name:
                    raise InvalidArgument(f"{place}.name is not set", field=f"{place}.name", reason="MISSING_FIELD")
                arguments = msgspec.json.encode(block.input or {}).decode()
                calls.append(ToolCall(id=block.id, name=block.name, arguments=arguments))
            case kind:
                raise _not_served(kind, place)
    return ChatMessage(
        role="assistant", content="\n".join(texts), reasoning="\n".join(thoughts), tool_calls=tuple(calls)
    )


def _question(turn: TurnBody, path: str) -> list[ChatMessage]:
    if isinstance(turn.content, str):
        return [ChatMessage(role="user", content=turn.content)]
    parts, results = [], []
    for index, block in enumerate(turn.content):
        place = f"{path}.content[{index}]"
        match block.type:
            case "text" | "image":
                parts.append(_part(block, path, f"content[{index}]"))
            case "tool_result":
                if not block.tool_use_id:
                    field = f"{place}.tool_use_id"
                    raise InvalidArgument(f"{field} is not set", field=field, reason="MISSING_FIELD")
                content = _result(block.content, path, f"content[{index}].content")
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
    """A text or an image. Raises Unimplemented for another block."""
    if block.type == "image":
        return ContentPart(type="media", media=image_of(block.source, path, f"{place}.source"))
    if block.type != "text":
        raise _not_served(block.type, f"{path}.{place}")
    return ContentPart(type="text", text=block.text)


def _joined(parts: list[ContentPart]) -> str | list[ContentPart]:
    """One text, where there is nothing but texts."""
    return parts if any(part.media for part in parts) else "\n".join(part.text for part in parts)


def _not_served(kind: str, place: str) -> Unimplemented:
    return Unimplemented(f"{place}.type is {quoted(kind)}, which is not served here", field=f"{place}.type")
