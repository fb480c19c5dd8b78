"""How many entries the lists of a request may have. Lists are counted before they are looked at, or copied."""

from collections.abc import Sequence
from typing import Any

from penstock_common.errors import InvalidArgument
from penstock_frontend.config import LimitsConfig


def check_count(field: str, count: int, limits: LimitsConfig, name: str) -> None:
    """Raise InvalidArgument for more entries in ``field`` than the limit ``name`` says."""
    limit: int = getattr(limits, name)
    if count > limit:
        raise InvalidArgument(f"{field} has {count} entries; limits.{name} is {limit}", field=field)


def check_conversation(messages: Sequence[Any], tools: Sequence[Any], limits: LimitsConfig) -> None:
    """Raise InvalidArgument for too many messages or tools, and for a message with too many parts or tool calls.

    The messages are the domain's, or those of the public API.
    """
    check_count("messages", len(messages), limits, "max_messages")
    check_count("tools", len(tools), limits, "max_tools")
    for index, message in enumerate(messages):
        check_count(f"messages[{index}].tool_calls", len(message.tool_calls), limits, "max_tool_calls")
        if isinstance(message.content, list):
            check_count(f"messages[{index}].content", len(message.content), limits, "max_content_parts")
