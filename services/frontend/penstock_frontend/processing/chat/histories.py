"""Serves what is odd in conversations that clients send back: arguments of calls that are no JSON, results without calls."""

import json
from collections.abc import Sequence

import msgspec

from penstock_frontend.call_types import ChatMessage, ContentPart
from penstock_frontend.call_warnings import WarningKind, warn
from penstock_frontend.processing.media.families.base import Family
from penstock_frontend.processing.prompts.mixed_prompt import A

INVALID = "INVALID_JSON"
"""The key under which the model sees arguments that are no JSON object, as Anthropic's documentation has it."""


def arguments_text(given: object, field: str) -> str:
    """Return the arguments of a call as the text of a JSON object.

    None and an empty text are an empty object. A text may hold the object's text once more. Anything else, such as arguments that
    ``max_tokens`` cut off, becomes a text in an object, with a warning about ``field``.
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
        f"is no JSON object, and is shown to the model as a text under the key {INVALID}",
    )
    return _text({INVALID: text})


def warn_of_lost_calls(messages: Sequence[ChatMessage], places: Sequence[str]) -> None:
    """Warn of results that belong to no call before them. ``places``: the client's field of each message."""
    calls: set[str] = set()
    for message, place in zip(messages, places, strict=True):
        calls.update(call.id for call in message.tool_calls)
        if message.role == "tool" and message.tool_call_id and message.tool_call_id not in calls and "" not in calls:
            warn(WarningKind.RESULT_WITHOUT_CALL, place, "is the result of a call that the conversation does not have")


def without_unread(messages: Sequence[ChatMessage], family: Family | None) -> Sequence[ChatMessage]:
    """Return the messages, in which a text stands for each medium of a tool's result that the model does not read, with a
    warning. Clients cannot know what their tools will give. ``family``: None for a model that reads text alone.
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
