"""How deeply values nest, found out without recursion."""

from collections.abc import Iterable
from typing import Any

# How deeply values nest, found out without recursion.

MAX_ARGUMENT_DEPTH = 64
"""How deeply arguments of methods that are called by name may nest, the array that they are in included."""


def nests_deeper(value: Any, limit: int) -> bool:
    """Whether there are more than ``limit`` dicts and lists around a part of ``value``. An empty one has no parts."""
    level = [value]
    for _ in range(limit + 1):
        level = [part for whole in level if isinstance(whole, dict | list) for part in _parts(whole)]
        if not level:
            return False
    return True


def _parts(whole: dict[Any, Any] | list[Any]) -> Iterable[Any]:
    return whole.values() if isinstance(whole, dict) else whole
