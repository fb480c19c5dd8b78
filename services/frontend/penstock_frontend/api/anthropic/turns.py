"""Conversion of the messages, images and tools in Anthropic's protocol to domain types."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_frontend.api.anthropic.protocol import (
    BlockBody,
    ClientToolBody,
    ConversationBody,
    SourceBody,
    ToolUseChoiceBody,
    TurnBody,
    blocks_of,
    opened,
)
from penstock_frontend.api.media_sources import source_of_base64, source_of_url
from penstock_frontend.api.openai.conversation import effort_kwargs
from penstock_frontend.api.openai.response_format import Constraint
from penstock_frontend.api.tools import ServedTools, ToolChoice
from penstock_frontend.call_types import ChatMessage, ContentPart, MediaPart, ToolCall
from penstock_frontend.call_warnings import WarningKind, warn
from penstock_frontend.processing.chat.histories import arguments_text, warn_of_lost_calls

# Chat templates have no form for some types of blocks. These blocks become text in the prompt.

TEXTS = ("text", "document", "search_result", "tool_reference")
"""Types of blocks that are text, or that become text in the prompt."""
_SECRETS = ("encrypted_content", "encrypted_index", "encrypted_stdout")


def text_of(block: BlockBody, place: str) -> str:
    """Return the text of a block. Raises InvalidArgument, and Unimplemented for a document that is a file."""
    match block.type:
        case "text":
            return block.text
        case "tool_reference":
            return f"[tool {block.tool_name}]"
        case "search_result":
            source = block.source if isinstance(block.source, str) else ""
            return "\n".join(filter(None, (block.title, source, _content(block.content, f"{place}.content"))))
        case _:
            return "\n".join(filter(None, (block.title, block.context, _document(block.source, f"{place}.source"))))


def result_text(block: BlockBody, place: str) -> str:
    """Return, as text, the result of a tool that Anthropic ran. Encrypted parts are left out."""
    if isinstance(block.content, str):
        return block.content
    found = _readable(block.content)
    if found != block.content:
        warn(
            WarningKind.HISTORY_LEFT_OUT,
            f"{place}.content",
            "has encrypted parts, which only the server that encrypted them can read",
        )
    return msgspec.json.encode(found).decode()


def _document(source: SourceBody | str | None, place: str) -> str:
    if not isinstance(source, SourceBody):
        raise InvalidArgument(f"{place} is not set", field=place, reason="MISSING_FIELD")
    match source.type:
        case "text":
            return source.data
        case "content":
            return _content(source.content, f"{place}.content")
        case kind:
            raise Unimplemented(
                f"{place}.type is {quoted(kind)}; known: text, content. This server does not read document files",
                field=f"{place}.type",
            )


def _content(content: Any, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, block in enumerate(content if isinstance(content, Sequence) else ()):
        if not isinstance(block, Mapping) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            kind = block.get("type") if isinstance(block, Mapping) else None
            field = f"{place}[{index}].type"
            raise Unimplemented(f"{field} is {quoted(str(kind))}; only 'text' is supported here", field=field)
        texts.append(block["text"])
    return "\n".join(texts)


def _readable(value: Any) -> Any:
    """Return a copy of a JSON value without its encrypted parts."""
    if isinstance(value, Mapping):
        return {name: _readable(each) for name, each in value.items() if name not in _SECRETS}
    return [_readable(each) for each in value] if isinstance(value, list) else value


# The code below converts images.

_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")


def image_of(source: SourceBody | None, path: str, place: str) -> MediaPart:
    """Return the image that the source ``place`` of the turn at ``path`` has. The field path of the image is relative
    to the turn.

    Raises InvalidArgument, and Unimplemented for an uploaded file.
    """
    where = f"{path}.{place}"
    if source is None:
        raise InvalidArgument(f"{where} is not set", field=where, reason="MISSING_FIELD")
    match source.type:
        case "base64":
            if source.media_type not in _TYPES:
                field = f"{where}.media_type"
                raise InvalidArgument(
                    f"{field} is {quoted(source.media_type)}; known: {', '.join(_TYPES)}", field=field
                )
            if not source.data:
                raise InvalidArgument(f"{where}.data is not set", field=f"{where}.data", reason="MISSING_FIELD")
            name, found = "data", source_of_base64(source.data)
        case "url":
            if not source.url:
                raise InvalidArgument(f"{where}.url is not set", field=f"{where}.url", reason="MISSING_FIELD")
            name, found = "url", source_of_url("image", source.url, field=f"{where}.url")
        case kind:
            field = f"{where}.type"
            raise Unimplemented(f"{field} is {quoted(kind)}; known: base64, url", field=field)
    return MediaPart(modality="image", source=found, field=f"{place}.{name}")


_BILLING = "x-anthropic-billing-header"
"""Beginning of a system text block that Anthropic's own clients send. The text of this block is different in every
call.
"""


class Turns(NamedTuple):
    """The messages as domain types, with the path of each message in the body."""

    messages: list[ChatMessage]
    places: list[str]


def turns_of(body: ConversationBody) -> Turns:
    """Convert the conversation in a body to messages as domain types.

    All system texts form the first message, because templates expect the system message there. The turns come after it.
    Tool results become separate messages before the other content of their turn. Field paths of images are relative to
    their turns. Raises InvalidArgument and Unimplemented.
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
    """Return True if the last message is an assistant message, which the answer must then continue."""
    return bool(body.messages) and body.messages[-1].role == "assistant"


def template_kwargs(body: ConversationBody) -> dict[str, Any]:
    """Return the variables of the chat template that the body sets."""
    effort = body.output_config.effort if body.output_config is not None else None
    thinking = {} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}
    return {**effort_kwargs(effort, "output_config.effort"), **thinking, **(body.chat_template_kwargs or {})}


def format_constraint(body: ConversationBody) -> Constraint | None:
    """Return the output constraint in ``output_config.format``. Return None if there is none. Raises InvalidArgument if
    the format is not valid.
    """
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
    """Return the assistant's messages of one turn. After each result of a tool that Anthropic ran, a new message
    starts.
    """
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
                        "is thinking that another server omitted, which only that server can read",
                    )
                said.thoughts.append(thought)
            case "redacted_thinking":
                warn(
                    WarningKind.HISTORY_LEFT_OUT,
                    place,
                    "is redacted thinking, which only the server that encrypted it can read",
                )
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
    """An assistant message that is still being put together."""

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
    """Return a message with the result of a tool that Anthropic ran."""
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
    """Return the texts of the system prompt. Billing texts are left out, because each of them would make the prompt
    begin differently.
    """
    if content is None or isinstance(content, str):
        return [content] if content else []
    for index, block in enumerate(content):
        if block.type != "text":
            raise _not_served(block.type, f"{path}[{index}]")
    return [block.text for block in content if not block.text.startswith(_BILLING)]


def _result(content: str | Sequence[BlockBody] | None, path: str, place: str) -> str | list[ContentPart]:
    """Return the tool result of a block as a domain type. ``place`` is the path of the result in the turn at ``path``."""
    if content is None or isinstance(content, str):
        return content or ""
    return _joined([_part(block, path, f"{place}[{index}]") for index, block in enumerate(content)])


def _part(block: BlockBody, path: str, place: str) -> ContentPart:
    """Return an image part for an image block, and a text part for a block that is or becomes text. Raises
    Unimplemented for other blocks.
    """
    if block.type == "image":
        source = None if isinstance(block.source, str) else block.source
        return ContentPart(type="media", media=image_of(source, path, f"{place}.source"))
    if block.type not in TEXTS:
        raise _not_served(block.type, f"{path}.{place}")
    return ContentPart(type="text", text=text_of(block, f"{path}.{place}"))


def _joined(parts: list[ContentPart]) -> str | list[ContentPart]:
    """Return the parts joined to one text if all of them are texts. Otherwise return the parts unchanged."""
    return parts if any(part.media for part in parts) else "\n".join(part.text for part in parts)


def _not_served(kind: str, place: str) -> Unimplemented:
    return Unimplemented(f"{place}.type is {quoted(kind)}, which is not supported here", field=f"{place}.type")


# The code below converts tools and the tool choice.

_MODES = {"auto": "auto", "any": "required", "none": "none"}


def tools_of(bodies: Sequence[ClientToolBody] | None) -> ServedTools:
    """Return the tools of a body as domain types. Tools that Anthropic runs or defines have other types, and are left
    out. Raises InvalidArgument if a tool is not valid.
    """
    tools = ServedTools()
    for index, body in enumerate(bodies or ()):
        path = f"tools[{index}]"
        if body.type in (None, "custom"):
            tools.function(body.name, body.description, body.input_schema, path, schema="input_schema")
        else:
            tools.leave_out(body.type, path, body.name)
    return tools


def choice_of(choice: ToolUseChoiceBody | None, *, tools: bool) -> ToolChoice:
    """Return the tool choice of a body. ``tools`` is True if the body has tools. Raises InvalidArgument if the tool
    choice is not valid.
    """
    if choice is None:
        return ToolChoice("auto")
    if choice.type == "tool":
        if not choice.name:
            raise InvalidArgument("tool_choice.name is empty", field="tool_choice.name")
        return ToolChoice("auto", named=choice.name)
    if choice.type not in _MODES:
        known = ", ".join([*_MODES, "tool"])
        raise InvalidArgument(f"tool_choice.type is {quoted(choice.type)}; known: {known}", field="tool_choice.type")
    if choice.type == "any" and not tools:
        raise InvalidArgument("tool_choice.type is 'any', but there are no tools; set tools", field="tool_choice.type")
    return ToolChoice(_MODES[choice.type], field="tool_choice.type")
