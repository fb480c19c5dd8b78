"""Check of the nesting depth of values, without recursion."""

from collections.abc import Iterable
from typing import Any

MAX_ARGUMENT_DEPTH = 64
"""Maximum nesting depth of the arguments of methods that are called by name, including the array that contains the
arguments.
"""


def nests_deeper(value: Any, limit: int) -> bool:
    """Return whether a value inside ``value`` is nested in more than ``limit`` dicts and lists."""
    level = [value]
    for _ in range(limit + 1):
        level = [part for whole in level if isinstance(whole, dict | list) for part in _parts(whole)]
        if not level:
            return False
    return True


def _parts(whole: dict[Any, Any] | list[Any]) -> Iterable[Any]:
    return whole.values() if isinstance(whole, dict) else whole
