"""Warnings about a call that is answered although a part of its request was left out or changed.

``warn`` may be called wherever the call is served. The API puts the warnings into the header ``penstock-warning``, and in gRPC
into initial metadata of that name.
"""

import enum
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextvars import ContextVar

from prometheus_client import CollectorRegistry, Counter

from penstock_common.observability.logging import get_logger

_MAX_CLIENTS = 1024
_MAX_THINGS = 64
"""Things that are logged of one client, at most."""


class LoggedOnce:
    """Remembers what was logged of each client, within bounds: it forgets the client that was heard of longest ago."""

    def __init__(self) -> None:
        self._told: OrderedDict[str, set[str]] = OrderedDict()

    def new(self, client: str, things: Iterable[str]) -> list[str]:
        """Return those of ``things`` that are to be logged now, and remember them. A client has at most 64."""
        told = self._told.setdefault(client, set())
        self._told.move_to_end(client)
        if len(self._told) > _MAX_CLIENTS:
            self._told.popitem(last=False)
        found = [thing for thing in dict.fromkeys(things) if thing not in told][: _MAX_THINGS - len(told)]
        told.update(found)
        return found


HEADER = "penstock-warning"
_MAX_TEXT = 240
"""Characters of one warning, its kind included."""
_MAX_HEADER = 1024
"""Characters of the header's value: proxies bound the size of all headers, often to 4 or 8 KiB."""
_SEPARATOR = "; "
_UNSAFE = re.compile(r"[^\x20-\x7e]")


class WarningKind(enum.StrEnum):
    """What was done to the request. Each kind is a label of the metric, so that there are few."""

    TOOL_LEFT_OUT = "tool_left_out"
    """The model is not told of a tool that this server does not run."""
    TOOL_FORMAT_NOT_ENFORCED = "tool_format_not_enforced"
    """A custom tool's input is free text, although the tool has a grammar."""
    HISTORY_LEFT_OUT = "history_left_out"
    """The model does not see an item of the conversation, which only its author can read."""
    HISTORY_AS_TEXT = "history_as_text"
    """The model sees an item of the conversation as text, since chat templates have no form for it."""
    ARGUMENTS_NOT_JSON = "arguments_not_json"
    """The arguments of a call in the conversation are no JSON object; the model sees them as a text."""
    RESULT_WITHOUT_CALL = "result_without_call"
    """A tool's result in the conversation belongs to no call in it."""
    MEDIA_LEFT_OUT = "media_left_out"
    """The model sees a text in the place of an image, a sound or a video of a tool's result, which it does not read."""
    DOUBLE_BOS = "double_bos"
    """The prompt begins with the token that begins a text, and the tokenizer puts another one in front."""
    HINT_IGNORED = "hint_ignored"
    """A value of a field has no effect here; the answer is as without it."""


class CallWarnings:
    """The warnings of one call, in the order in which they were added."""

    def __init__(self, log: "WarningLog", client: str) -> None:
        self._log = log
        self._client = client
        self._texts: dict[str, None] = {}
        self.names: Mapping[str, str] = {}
        """Our names of fields to the client's, for warnings that are still to come."""

    def add(self, kind: WarningKind, field: str, text: str) -> None:
        """Add a warning unless the call has it already; log and count it."""
        for ours, theirs in self.names.items():
            rest = field.removeprefix(ours)
            if rest != field and rest[:1] in ("", ".", "["):
                field = theirs + rest
                break
        shown = _header_safe(f"{kind}: {field} {text}")
        if shown not in self._texts:
            self._texts[shown] = None
            self._log.tell(kind, field, self._client)

    @property
    def headers(self) -> dict[str, str]:
        """The header ``penstock-warning``, of printable ASCII and at most 1024 characters; empty without warnings."""
        return {HEADER: _joined(list(self._texts))} if self._texts else {}


class WarningLog:
    """Logs warnings, each kind once per client, and counts them. Belongs to the event loop's thread and those it waits for.

    Args:
        registry: For the count of warnings by kind; None counts nothing.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._logged = LoggedOnce()
        self._count = (
            None
            if registry is None
            else Counter(
                "penstock:request_warnings",
                "Warnings about requests of which a part was left out or changed",
                ["kind"],
                registry=registry,
            )
        )

    def begin(self, client: str) -> CallWarnings:
        """Collect the warnings of the call that this task serves. ``client``: who calls, for the log."""
        warnings = CallWarnings(self, client)
        _current.set(warnings)
        return warnings

    def tell(self, kind: WarningKind, field: str, client: str) -> None:
        """Count a warning, and log it if it is the client's first of its kind. Logs do not have texts of clients."""
        if self._count is not None:
            self._count.labels(kind.value).inc()
        if self._logged.new(client, [kind]):
            get_logger().warning("request was changed to be served", kind=kind.value, field=field, client=client)


def warn(kind: WarningKind, field: str, text: str) -> None:
    """Warn the client of the call that this task serves. Outside of a call the warning is logged only.

    Args:
        kind: What was done to the request.
        field: The place in the request, as the client calls it, such as ``tools[1]``.
        text: Goes on behind the field: ``is of type 'web_search', ...``. Values of clients are excerpts in it.
    """
    (_current.get() or CallWarnings(_OUTSIDE, "local")).add(kind, field, text)


def name_fields(names: Mapping[str, str]) -> None:
    """Have the call's later warnings name the client's fields. ``names``: our names, where a field begins, to the client's."""
    if (warnings := _current.get()) is not None:
        warnings.names = names


def _header_safe(text: str) -> str:
    """Printable ASCII without the separator, cut to its length."""
    safe = _UNSAFE.sub("?", text).replace(";", ",")
    return safe if len(safe) <= _MAX_TEXT else f"{safe[: _MAX_TEXT - 3]}..."


def _joined(texts: list[str]) -> str:
    found = ""
    for index, text in enumerate(texts):
        more = found + _SEPARATOR * bool(found) + text
        rest = f"{_SEPARATOR}and {len(texts) - index - 1} more" if index + 1 < len(texts) else ""
        if len(more) + len(rest) > _MAX_HEADER:
            return f"{found}{_SEPARATOR}and {len(texts) - index} more"
        found = more
    return found


_current: ContextVar[CallWarnings | None] = ContextVar("call_warnings", default=None)
_OUTSIDE = WarningLog()
