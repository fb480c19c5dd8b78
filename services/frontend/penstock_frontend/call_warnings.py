"""Warnings to the client about a call in which the server ignored or changed a part of the request.

Any code that serves the call may call ``warn``. HTTP APIs return the warnings in the header ``penstock-warning``. gRPC
APIs return the warnings in initial metadata of the same name.
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
"""Maximum number of items that are logged for each client."""


class LoggedOnce:
    """Remembers which items were already logged for each client. If there are too many clients, the object forgets
    the client that was seen least recently.
    """

    def __init__(self) -> None:
        self._told: OrderedDict[str, set[str]] = OrderedDict()

    def new(self, client: str, things: Iterable[str]) -> list[str]:
        """Return the items that were not logged before for this client, and remember them.

        If 64 items were logged for the client, return no more items.
        """
        told = self._told.setdefault(client, set())
        self._told.move_to_end(client)
        if len(self._told) > _MAX_CLIENTS:
            self._told.popitem(last=False)
        found = [thing for thing in dict.fromkeys(things) if thing not in told][: _MAX_THINGS - len(told)]
        told.update(found)
        return found


HEADER = "penstock-warning"
_MAX_TEXT = 240
"""Maximum number of characters of one warning, including the name of the warning's kind."""
_MAX_HEADER = 1024
"""Maximum number of characters of the value of the response header. Proxies often limit all headers together to 4 or 8
KiB.
"""
_SEPARATOR = "; "
_UNSAFE = re.compile(r"[^\x20-\x7e]")


class WarningKind(enum.StrEnum):
    """Kind of change that the server made to a request. Each kind is a label value of the metric, so there must be few
    kinds.
    """

    TOOL_LEFT_OUT = "tool_left_out"
    """The model does not see a tool, because this server cannot run tools of this type."""
    TOOL_FORMAT_NOT_ENFORCED = "tool_format_not_enforced"
    """The input of a custom tool is generated as free text, although the tool has a grammar."""
    HISTORY_LEFT_OUT = "history_left_out"
    """The model does not see an item of the conversation, because only the server that created the item can read it."""
    HISTORY_AS_TEXT = "history_as_text"
    """The model sees an item of the conversation as text, because chat templates have no format for this item."""
    ARGUMENTS_NOT_JSON = "arguments_not_json"
    """The arguments of a tool call in the conversation are not a JSON object. The model sees the arguments as text."""
    RESULT_WITHOUT_CALL = "result_without_call"
    """A tool result in the conversation has no matching tool call."""
    MEDIA_LEFT_OUT = "media_left_out"
    """The model sees a text instead of a media item in a tool result, because it does not accept this modality."""
    DOUBLE_BOS = "double_bos"
    """The prompt begins with the beginning-of-sequence token, and the tokenizer adds this token a second time."""
    HINT_IGNORED = "hint_ignored"
    """The value of a field has no effect. The response would be the same without the field."""


class CallWarnings:
    """The warnings of one call, in order."""

    def __init__(self, log: "WarningLog", client: str) -> None:
        self._log = log
        self._client = client
        self._texts: dict[str, None] = {}
        self.names: Mapping[str, str] = {}
        """Map from the names of Penstock's fields to the names of the client's fields, for later warnings."""

    def add(self, kind: WarningKind, field: str, text: str) -> None:
        """Add a warning to the call, log it and count it. Do nothing if the call already has the same warning."""
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
        """Response header ``penstock-warning``, with at most 1024 printable ASCII characters. Empty if the call has no
        warnings.
        """
        return {HEADER: _joined(list(self._texts))} if self._texts else {}


class WarningLog:
    """Counts warnings, and logs each kind of warning once per client.

    All methods must be called on the event loop's thread, or while this thread waits.

    Args:
        registry: Metrics registry for the number of warnings by kind. None means that warnings are not counted.
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
        """Start to collect the warnings of the call that the current task serves.

        ``client`` is the name of the caller in the log.
        """
        warnings = CallWarnings(self, client)
        _current.set(warnings)
        return warnings

    def tell(self, kind: WarningKind, field: str, client: str) -> None:
        """Count a warning of a client. Log the warning if the client had no warning of this kind before.

        The log never contains texts from clients.
        """
        if self._count is not None:
            self._count.labels(kind.value).inc()
        if self._logged.new(client, [kind]):
            get_logger().warning(
                "served a request, but ignored or changed a field", kind=kind.value, field=field, client=client
            )


def warn(kind: WarningKind, field: str, text: str) -> None:
    """Add a warning to the call that the current task serves, so that the client receives it. If the task serves no
    call, only log the warning.

    Args:
        kind: The kind of change.
        field: The path of the field in the request, with the client's names, such as ``tools[1]``.
        text: Text after the field, such as ``is of type 'web_search', ...``. Values from clients must be shortened.
    """
    (_current.get() or CallWarnings(_OUTSIDE, "local")).add(kind, field, text)


def name_fields(names: Mapping[str, str]) -> None:
    """Make later warnings of the call name fields in the way in which the client knows them.

    ``names`` maps the prefix of a field path of Penstock to the prefix of the client's path.
    """
    if (warnings := _current.get()) is not None:
        warnings.names = names


def _header_safe(text: str) -> str:
    """Return the text in a form that fits into a header: printable ASCII without the separator of warnings, and at most
    ``_MAX_TEXT`` characters.
    """
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
