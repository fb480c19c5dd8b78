"""Repair of the conversation history that a client sends, for example of tool call arguments that are not JSON.

The module also warns of tool results without a matching tool call, and replaces media that the model cannot read.
"""

import json
from collections.abc import Sequence

import msgspec

from penstock_frontend.call_types import ChatMessage, ContentPart
from penstock_frontend.call_warnings import WarningKind, warn
from penstock_frontend.processing.media.families.base import Family
from penstock_frontend.processing.prompts.mixed_prompt import A

INVALID = "INVALID_JSON"
"""Key under which the model sees tool call arguments that are not a JSON object. Anthropic's documentation uses the
same key.
"""


def arguments_text(given: object, field: str) -> str:
    """Return the arguments of a tool call as the JSON text of an object.

    None and an empty text mean an empty object. The object may be encoded as JSON twice. Any other value, such as
    arguments that ``max_tokens`` has cut off, becomes a text inside an object, and the client gets a warning about
    ``field``.
    """
    if isinstance(given, dict):
        return _text(given)
    text = given if isinstance(given, str) else "" if given is None else _text(given)
    found = _decoded(text)
    if isinstance(found, dict) and found:
        return text
    if isinstance(found, str):
        found = _decoded(found)
    if isinstance(found, dict):
        return _text(found)
    warn(
        WarningKind.ARGUMENTS_NOT_JSON,
        field,
        f"is not a JSON object, so the model sees it as text under the key {INVALID}",
    )
    return _text({INVALID: text})


def warn_of_lost_calls(messages: Sequence[ChatMessage], places: Sequence[str]) -> None:
    """Warn about tool results for which the conversation has no earlier tool call. ``places`` has the client's field
    name of each message.
    """
    calls: set[str] = set()
    for message, place in zip(messages, places, strict=True):
        calls.update(call.id for call in message.tool_calls)
        if message.role == "tool" and message.tool_call_id and message.tool_call_id not in calls and "" not in calls:
            warn(WarningKind.RESULT_WITHOUT_CALL, place, "is the result of a call that is not in the conversation")


def without_unread(messages: Sequence[ChatMessage], family: Family | None) -> Sequence[ChatMessage]:
    """Replace media in tool results by a text if the model cannot read them, and warn the client.

    Such media are not an error, because clients cannot know in advance which media their tools return. ``family`` is
    None for a text-only model.
    """
    taken = family.modalities if family is not None else ()

    def readable(part: ContentPart) -> ContentPart:
        if part.media is None or part.media.modality in taken:
            return part
        kind = part.media.modality
        warn(WarningKind.MEDIA_LEFT_OUT, part.media.field, f"is {A[kind]} of a tool, which this model does not read")
        return ContentPart(type="text", text=f"[{kind} left out: this model does not read it]")

    return [
        msgspec.structs.replace(message, content=[readable(part) for part in message.content])
        if message.role == "tool" and message.content is not None and not isinstance(message.content, str)
        else message
        for message in messages
    ]


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _decoded(text: str) -> object:
    if not text.strip() or text.strip() == "null":
        return {}
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
