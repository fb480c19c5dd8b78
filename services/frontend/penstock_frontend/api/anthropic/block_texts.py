"""Blocks of Anthropic's protocol that chat templates have no form for, as text that the model sees."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_frontend.api.anthropic.messages_body import BlockBody, SourceBody
from penstock_frontend.telemetry.call_warnings import WarningKind, warn

TEXTS = ("text", "document", "search_result", "tool_reference")
"""Types of blocks that are text, or become text."""
_SECRETS = ("encrypted_content", "encrypted_index", "encrypted_stdout")


def text_of(block: BlockBody, place: str) -> str:
    """The text of a block. Raises InvalidArgument, and Unimplemented for documents that are files."""
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
    """What a tool that Anthropic runs gave, as text: of its parts what is readable."""
    if isinstance(block.content, str):
        return block.content
    found = _readable(block.content)
    if found != block.content:
        warn(WarningKind.HISTORY_LEFT_OUT, f"{place}.content", "has encrypted parts, which only their author can read")
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
                f"{place}.type is {quoted(kind)}; known: text, content. This server reads no files of documents",
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
            raise Unimplemented(f"{field} is {quoted(str(kind))}; only 'text' is served here", field=field)
        texts.append(block["text"])
    return "\n".join(texts)


def _readable(value: Any) -> Any:
    """A JSON value without what is encrypted."""
    if isinstance(value, Mapping):
        return {name: _readable(each) for name, each in value.items() if name not in _SECRETS}
    return [_readable(each) for each in value] if isinstance(value, list) else value
