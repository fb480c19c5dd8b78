"""Warnings about a call that is served although a part of its request was left out or changed.

``warn`` may be called anywhere while the call is served. HTTP APIs return the warnings in the header
``penstock-warning``, gRPC in initial metadata with the same name.
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
"""Maximum number of items logged per client."""


class LoggedOnce:
    """Remembers the items that were logged for each client. At its limit it forgets the client that was seen longest
    ago.
    """

    def __init__(self) -> None:
        self._told: OrderedDict[str, set[str]] = OrderedDict()

    def new(self, client: str, things: Iterable[str]) -> list[str]:
        """Return the items that must be logged now, and remember them. At most 64 items are logged per client."""
        told = self._told.setdefault(client, set())
        self._told.move_to_end(client)
        if len(self._told) > _MAX_CLIENTS:
            self._told.popitem(last=False)
        found = [thing for thing in dict.fromkeys(things) if thing not in told][: _MAX_THINGS - len(told)]
        told.update(found)
        return found


HEADER = "penstock-warning"
_MAX_TEXT = 240
"""Maximum characters of one warning, including its kind."""
_MAX_HEADER = 1024
"""Maximum characters of the header's value. Proxies often limit all headers together to 4 or 8 KiB."""
_SEPARATOR = "; "
_UNSAFE = re.compile(r"[^\x20-\x7e]")


class WarningKind(enum.StrEnum):
    """Kind of a change to the request. Each kind is a label of the metric, so there must be few."""

    TOOL_LEFT_OUT = "tool_left_out"
    """The model does not see a tool that this server does not run."""
    TOOL_FORMAT_NOT_ENFORCED = "tool_format_not_enforced"
    """The input of a custom tool is free text, although the tool has a grammar."""
    HISTORY_LEFT_OUT = "history_left_out"
    """The model does not see an item of the conversation, because only its author can read it."""
    HISTORY_AS_TEXT = "history_as_text"
    """The model sees an item of the conversation as text, because chat templates have no form for it."""
    ARGUMENTS_NOT_JSON = "arguments_not_json"
    """The arguments of a call in the conversation are not a JSON object. The model sees them as text."""
    RESULT_WITHOUT_CALL = "result_without_call"
    """A tool result in the conversation has no matching call."""
    MEDIA_LEFT_OUT = "media_left_out"
    """The model sees a text instead of an image, audio item or video in a tool result, because it does not take that
    modality.
    """
    DOUBLE_BOS = "double_bos"
    """The prompt begins with the beginning-of-sequence token, and the tokenizer adds another one."""
    HINT_IGNORED = "hint_ignored"
    """A value of a field has no effect; the answer is the same without it."""


class CallWarnings:
    """The warnings of one call, in order."""

    def __init__(self, log: "WarningLog", client: str) -> None:
        self._log = log
        self._client = client
        self._texts: dict[str, None] = {}
        self.names: Mapping[str, str] = {}
        """Map from our field names to the client's, for later warnings."""

    def add(self, kind: WarningKind, field: str, text: str) -> None:
        """Add a warning unless the call already has it. Log and count it."""
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
        """Header ``penstock-warning``, printable ASCII of at most 1024 characters; empty without warnings."""
        return {HEADER: _joined(list(self._texts))} if self._texts else {}


class WarningLog:
    """Logs warnings, each kind once per client, and counts them. Must be used on the event loop's thread, or while that
    thread waits.

    Args:
        registry: Registry for the count of warnings by kind; None: they are not counted.
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
        """Start to collect the warnings of the call that this task serves. ``client``: name of the caller, for the log."""
        warnings = CallWarnings(self, client)
        _current.set(warnings)
        return warnings

    def tell(self, kind: WarningKind, field: str, client: str) -> None:
        """Count a warning, and log it if it is the client's first of its kind. The log never contains texts from
        clients.
        """
        if self._count is not None:
            self._count.labels(kind.value).inc()
        if self._logged.new(client, [kind]):
            get_logger().warning("request was changed to be served", kind=kind.value, field=field, client=client)


def warn(kind: WarningKind, field: str, text: str) -> None:
    """Warn the client of the call that this task serves. Outside of a call the warning is only logged.

    Args:
        kind: The kind of change.
        field: The path in the request, in the client's names, such as ``tools[1]``.
        text: Text that follows the field: ``is of type 'web_search', ...``. Values from clients must be shortened.
    """
    (_current.get() or CallWarnings(_OUTSIDE, "local")).add(kind, field, text)


def name_fields(names: Mapping[str, str]) -> None:
    """Make later warnings of the call use the client's field names. ``names``: map from our field prefixes to the
    client's.
    """
    if (warnings := _current.get()) is not None:
        warnings.names = names


def _header_safe(text: str) -> str:
    """Return the text as printable ASCII without the separator, shortened to the limit."""
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
