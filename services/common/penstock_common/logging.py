"""Structured logs: one line per event, as text for people or JSON for collectors."""

import logging
import sys

import structlog

from penstock_common.config import LogConfig


def configure(config: LogConfig, *, service: str) -> None:
    """Send the logs of this process to standard error. ``service`` is bound to every line in JSON."""
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(
            fmt="iso" if config.format == "json" else "%H:%M:%S", utc=config.format == "json"
        ),
        structlog.processors.StackInfoRenderer(),
    ]
    renderer: list[structlog.types.Processor]
    if config.format == "json":
        renderer = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        # Plain tracebacks: the default shows local variables, and with them the users' prompts.
        plain = structlog.dev.plain_traceback
        renderer = [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), pad_event_to=0, pad_level=False, exception_formatter=plain
            )
        ]
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, config.level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    if config.format == "json":
        structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s [%(levelname)s] %(name)s %(message)s", datefmt="%H:%M:%S"
    )


def configure_library() -> None:
    """Let warnings and worse alone through to standard error, unless the program has configured structlog itself."""
    if not structlog.is_configured():
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """The logger of this process."""
    return structlog.get_logger()  # type: ignore[no-any-return]
