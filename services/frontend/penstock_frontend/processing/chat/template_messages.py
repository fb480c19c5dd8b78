"""What a frontend and the process that renders clients' chat templates say to each other: JSON behind its length."""

import struct
from typing import Any

import msgspec

LENGTH = struct.Struct("<I")
"""In front of each message: its length in bytes."""


class TemplateJob(msgspec.Struct, frozen=True, kw_only=True):
    """A template to render. ``max_chars``: length limit of the prompt, in characters."""

    source: str
    special_tokens: dict[str, str]
    variables: dict[str, Any]
    max_chars: int


class TemplateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt, or why there is none: ``error`` is about ``field`` of the request."""

    prompt: str = ""
    error: str = ""
    field: str = ""


def framed(message: TemplateJob | TemplateAnswer) -> bytes:
    """A message as it is sent."""
    encoded = msgspec.json.encode(message)
    return LENGTH.pack(len(encoded)) + encoded
