"""The texts that a client gives a chat template, which are JSON's, and the characters in them that could begin a token."""

import re
from collections.abc import Callable, Collection
from typing import Any


def texts_in(value: Any) -> list[str]:
    """Every text of a template's variable: keys of objects, too."""
    texts: list[str] = []
    values = [value]
    for each in values:  # which grows meanwhile
        if isinstance(each, str):
            texts.append(each)
        elif isinstance(each, dict):
            texts += each
            values += each.values()
        elif isinstance(each, (list, tuple)):
            values += each
    return texts


def changed(value: Any, change: Callable[[str], str]) -> Any:
    """The same variable with ``change`` of every text in it."""
    if isinstance(value, str):
        return change(value)
    # No comprehensions: each would be a second frame of the stack for every level, and JSON may nest 512 levels.
    if isinstance(value, dict):
        mapping = {}
        for key, each in value.items():
            mapping[change(key)] = changed(each, change)
        return mapping
    if isinstance(value, (list, tuple)):
        items = []
        for each in value:
            items.append(changed(each, change))  # noqa: PERF401
        return items
    return value


def openings(tokens: Collection[str]) -> re.Pattern[str]:
    """Matches the first character of each of ``tokens`` in a text: where the rest of the token follows, or as much of the rest as
    there is before the text's end. A template may trim that end, and write the rest behind it from another text.
    """
    by_first: dict[str, list[str]] = {}
    for token in tokens:
        by_first.setdefault(token[0], []).append(token[1:])
    return re.compile("|".join(f"{re.escape(first)}(?={_rest(rests)})" for first, rests in by_first.items()))


def _rest(rests: Collection[str]) -> str:
    """Matches one of ``rests``, or the begin of one up to the text's end. Common begins are looked at once."""
    if "" in rests:
        return ""
    by_first: dict[str, list[str]] = {}
    for rest in rests:
        by_first.setdefault(rest[0], []).append(rest[1:])
    return rf"(?:\s*\Z|{'|'.join(re.escape(first) + _rest(more) for first, more in by_first.items())})"
