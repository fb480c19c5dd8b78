"""Structured logs: one line per event, as text for people or JSON for collectors.

Every line of a task has the values that the task has bound with ``structlog.contextvars``. Loggers of the standard
library, in this project and in other packages, write to the same log, and their ``extra`` values become fields.

Text lines are safe to display: characters in client data that move the cursor, end a line or change the writing
direction are escaped.
"""

import io
import logging
import secrets
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple, TextIO
from urllib.parse import unquote

import structlog

from penstock_common.config.sections import LogConfig
from penstock_common.errors import Internal

# Route and source address of a call, for the log.


class Caller(NamedTuple):
    """The route of a call (an HTTP path or a gRPC method), and its source address."""

    route: str = ""
    address: str = ""


NO_CALL = Caller()
current_caller: ContextVar[Caller] = ContextVar("current_caller", default=NO_CALL)
"""The call that the current task serves."""


def peer_address(peer: str) -> str:
    """Return the address of a gRPC peer: ``ipv6:%5B::1%5D:50051`` becomes ``[::1]:50051``."""
    family, _, address = unquote(peer).partition(":")
    return address if family in ("ipv4", "ipv6") else unquote(peer)


REQUEST_LOGGER = "penstock.requests"
"""Logger for the lines that ``log.requests`` enables."""


def configure(config: LogConfig, *, service: str) -> None:
    """Send the logs of this process to standard error. Every JSON line contains ``service``.

    A later call changes level and format, also for loggers that are in use. Loggers of Penstock's packages follow
    ``config.level``. For other loggers, warnings and errors are logged.
    """

    def add_service(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event["service"] = service
        return event

    is_json = config.format == "json"
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if is_json else "%H:%M:%S", utc=is_json),
        structlog.processors.StackInfoRenderer(),
    ]
    renderer: list[structlog.typing.Processor]
    if is_json:
        # Add the field ``service`` here, because log lines from other threads would not have a context variable.
        renderer = [add_service, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        renderer = [
            printable,
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), pad_event_to=0, pad_level=False, exception_formatter=_write_traceback
            ),
        ]
    level: int = getattr(logging, config.level.upper())
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,  # a cached logger would keep the old level
    )
    structlog.contextvars.clear_contextvars()
    _configure_standard_library(config, level, shared, renderer)


def configure_library() -> None:
    """Log only warnings and errors, to standard error. Does nothing if the program has configured structlog itself."""
    if not structlog.is_configured():
        *shared, renderer = structlog.get_config()["processors"]
        structlog.configure(
            processors=[*shared, printable, renderer],
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """Return the logger of this process."""
    return structlog.get_logger()  # type: ignore[no-any-return]


class _Quoted:
    """A text that a renderer shows as its ``repr``, which contains only printable characters."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return repr(self._text)


def printable(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Escape unprintable characters in the texts of an event. Used as a structlog processor before a text renderer."""
    for key, value in event.items():
        if not isinstance(value, str) or value.isprintable():
            continue
        event[key] = _escaped(value.rstrip("\n")) if key == "event" else _Quoted(value)
    return event


def _escaped(text: str) -> str:
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _write_traceback(out: TextIO, exc_info: structlog.typing.ExcInfo) -> None:
    """Write a plain traceback. structlog's default shows local variables, which may contain users' prompts."""
    plain = io.StringIO()
    structlog.dev.plain_traceback(plain, exc_info)
    out.write("\n".join(map(_escaped, plain.getvalue().split("\n"))))


class _StandardError(logging.StreamHandler[TextIO]):
    """Handler that Penstock adds to the root logger. The class distinguishes this handler from other handlers."""


def _configure_standard_library(
    config: LogConfig,
    level: int,
    shared: list[structlog.typing.Processor],
    renderer: list[structlog.typing.Processor],
) -> None:
    root = logging.getLogger()
    handler = next((each for each in root.handlers if isinstance(each, _StandardError)), None) or _StandardError(
        sys.stderr
    )
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, structlog.stdlib.ExtraAdder(), *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for package in ("penstock_common", "penstock_enginecore"):
        logging.getLogger(package).setLevel(level)
    logging.getLogger(REQUEST_LOGGER).setLevel(level if config.requests else logging.ERROR + 1)


# Warnings about events that an unauthenticated client can cause at any rate.


class LimitedLog:
    """Logger that writes each event at most once per interval, and counts suppressed events. Not thread-safe."""

    def __init__(
        self, logger: logging.Logger, interval_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create a log that writes to ``logger``.

        ``interval_s`` is the minimum time in seconds between two lines of one event. ``clock`` returns seconds.
        """
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._events: dict[str, tuple[float, int]] = {}
        """Time of each event's last line, and the number of suppressed events since then."""

    def warning(self, event: str, **fields: object) -> None:
        """Log ``event`` with its fields. The field ``left_out`` is the number of suppressed events since the last line."""
        now = self._clock()
        written, left_out = self._events.get(event, (now - self._interval_s, 0))
        if now - written < self._interval_s:
            self._events[event] = written, left_out + 1
            return
        self._events[event] = now, 0
        self._logger.warning(event, extra={**fields, "left_out": left_out} if left_out else fields)


# Unexpected failures. Each has an incident number, which is in the client's error. Operators find the stack trace in
# the log by this number.

REASON = "INCIDENT"
"""Error reason of a request that would also fail on another engine. Such a request is not retried."""
STEP_FAILED = "STEP_FAILED"
"""Error reason of a request that was the only cause of its engine's failed step. The request may be retried on one
other engine.
"""

logger = logging.getLogger(__name__)


def incident(error: BaseException, *, request: str, doing: str, reason: str = REASON) -> Internal:
    """Log an unexpected ``error`` with its stack trace, once, and return the error that ends its request.

    ``request`` is the ID to find in the log. ``doing`` is the failed activity ("validating the request"). The client
    gets the incident number but no text of ``error``, because the text may quote other requests.
    """
    number = secrets.token_hex(4)
    fields = {"incident": number, "request": request, "doing": doing, "error": type(error).__name__}
    logger.error("incident %s: %s failed", number, doing, exc_info=error, extra=fields)
    return Internal(f"{doing} failed unexpectedly; the service's log has it as incident {number}", reason=reason)
