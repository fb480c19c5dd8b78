"""Fields of messages that are JSON objects as text."""

import json
from typing import Any

from penstock_common.errors import InvalidArgument


def object_of(text: str, field: str) -> dict[str, Any] | None:
    """The JSON object in a field; None when it is empty. Raises InvalidArgument."""
    if not text:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise InvalidArgument(f"{field} is no JSON: {e}", field=field) from None
    if not isinstance(value, dict):
        raise InvalidArgument(f"{field} is no JSON object", field=field)
    return value
