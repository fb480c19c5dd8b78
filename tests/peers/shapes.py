"""Structure of an answer, without its values: its fields and their kinds, and the events of a stream."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

_WORDS = {
    "object",
    "type",
    "role",
    "status",
    "finish_reason",
    "stop_reason",
    "code",
    "param",
    "tool_choice",
    "owned_by",
}
"""Fields whose values clients compare."""
_KEYED = ("top_logprobs[]", "prompt_logprobs[]")
"""Objects whose keys are data."""
_MISSING = "-"
_CONTAINERS = {"object", "list"}


class Difference(NamedTuple):
    """A field with its kind in each answer, "-" if the answer lacks the field."""

    field: str
    there: str
    here: str


class Event(NamedTuple):
    """One event of a stream. ``name`` is empty if the stream has none. ``data`` is JSON, or text if it is not valid
    JSON.
    """

    name: str
    data: Any


def kinds(value: Any, path: str = "") -> dict[str, set[str]]:
    """Return the kinds of every field. A kind is the word itself, the prefix of an id, or the type."""
    found = {path: {_kind(path.rpartition(".")[2], value)}}
    if isinstance(value, Mapping):
        for name, each in value.items():
            _add(found, kinds(each, f"{path}.*" if path.endswith(_KEYED) else f"{path}.{name}".removeprefix(".")))
    elif isinstance(value, list):
        for each in value:
            _add(found, kinds(each, f"{path}[]"))
    return found


def differences(there: Mapping[str, set[str]], here: Mapping[str, set[str]]) -> list[Difference]:
    """Return the fields that differ, by name. If only one answer has a field, the fields below it are part of that
    difference.
    """
    found, one_sided = [], set[str]()
    for field in sorted(there.keys() | here.keys()):
        if one_sided.intersection(_parents(field)):
            continue
        sides = [" or ".join(sorted(side.get(field, {_MISSING}))) for side in (there, here)]
        if sides[0] != sides[1]:
            found.append(Difference(field, *sides))
        if len({bool(_CONTAINERS & side.get(field, set())) for side in (there, here)}) > 1:
            one_sided.add(field)
    return found


def events_of(lines: Iterable[str]) -> list[Event]:
    """Yield the events of a stream of server-sent events, without comments."""
    events, name = [], ""
    for line in lines:
        if line.startswith("event:"):
            name = line.removeprefix("event:").strip()
        elif line.startswith("data:"):
            events.append(Event(name, line.removeprefix("data:").strip()))
            name = ""
    return events


def sequence(events: Iterable[Event]) -> list[str]:
    """Return the sequence of the events' labels, with repeated labels merged."""
    labels: list[str] = []
    for event in events:
        label = _label(event)
        if labels[-1:] != [label]:
            labels.append(label)
    return labels


def kinds_of_events(events: Iterable[Event]) -> dict[str, set[str]]:
    """Return the kinds of the fields of all events, with the event's name as prefix."""
    found: dict[str, set[str]] = {}
    for event in events:
        if isinstance(event.data, Mapping):
            _add(found, kinds(event.data, event.name))
    return found


def _label(event: Event) -> str:
    if not isinstance(event.data, Mapping):
        return str(event.data)
    if event.name:
        return event.name
    if "error" in event.data:
        return "error"
    choices = event.data.get("choices") or []
    if not choices:
        return "usage"
    delta = choices[0].get("delta", {})
    said = [name for name, value in delta.items() if value is not None] if delta else ["text"] * ("text" in choices[0])
    return "+".join([*said, *["finish"] * (choices[0].get("finish_reason") is not None)]) or "nothing"


def _add(into: dict[str, set[str]], more: Mapping[str, set[str]]) -> None:
    for field, found in more.items():
        into.setdefault(field, set()).update(found)


def _parents(field: str) -> list[str]:
    return [field[:end] for end, sign in enumerate(field) if sign in ".["]


def _kind(name: str, value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        if name in _WORDS:
            return f'"{value}"'
        prefix, sign, _ = value.replace("-", "_").partition("_")
        return f"{value[: len(prefix) + 1]}..." if sign and (name == "id" or name.endswith("_id")) else "text"
    if isinstance(value, dict | list):
        return ("object" if value else "{}") if isinstance(value, dict) else ("list" if value else "[]")
    return type(value).__name__
