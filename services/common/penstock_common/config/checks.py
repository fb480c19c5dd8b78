"""Checks of settings beyond their annotated ranges, and range checks for values that msgspec does not validate."""

import functools
import socket
from collections.abc import Callable, Mapping

import msgspec

from penstock_common.config.settings import Kind, kind_of, struct_in
from penstock_common.errors import ConfigError

ENGINES_DECIDE = "set wedged_after of the engines, which detect and report a wedged state themselves"
"""Hint for the removed settings ``wedged_after`` of the coordinator and the frontend."""


def check_fields(section: str, config: msgspec.Struct) -> None:
    """Raise ConfigError if a field of ``config`` is outside the range or choices of its annotation.

    msgspec checks annotations only when it converts data. Call this function from ``__post_init__`` of structs that
    code also creates directly. ``section`` is the prefix of field names in messages, or empty.
    """
    _check(config, lambda name: f"{section}.{name}" if section else name)


def check_flags(options: msgspec.Struct) -> None:
    """Raise ConfigError if an option is outside its range or choices, or if a flag that is set has no effect.

    Messages name the flag, for example ``--max-model-len``. ``IDLE_WITH`` of the options lists the flags that disable
    other flags.
    """
    _check(options, flag_of)
    idle_with: Mapping[str, tuple[str, ...]] = getattr(options, "IDLE_WITH", {})
    defaults = {field.name: field.default for field in msgspec.structs.fields(options)}
    for name, others in idle_with.items():
        for other in others:
            if getattr(options, name) != defaults[name] and getattr(options, other) != defaults[other]:
                raise ConfigError(f"{flag_of(name)} has no effect with {flag_of(other)}; leave one of them out")


def flag_of(name: str) -> str:
    """Return the flag of an option."""
    return f"--{name.replace('_', '-')}"


def _check(config: msgspec.Struct, key_of: Callable[[str], str]) -> None:
    for name, kind in _kinds(type(config)):
        if refusal := kind.refusal(key_of(name), getattr(config, name)):
            raise ConfigError(refusal)


@functools.cache
def _kinds(config_type: type[msgspec.Struct]) -> tuple[tuple[str, Kind], ...]:
    fields = msgspec.structs.fields(config_type)
    return tuple((field.name, kind_of(field.type)) for field in fields if struct_in(field.type) is None)


def require(key: str, value: str) -> None:
    """Raise ConfigError if a required value is empty."""
    if not value:
        raise ConfigError(f"{key} is required")


def check_range(key: str, value: float | None, *, low: float | None = None, high: float | None = None) -> None:
    """Raise ConfigError unless ``low <= value <= high``. None means unset and passes."""
    if value is None:
        return
    below = low is not None and not value >= low
    above = high is not None and not value <= high
    if below or above:
        limit = f"at least {low}" if high is None else f"at most {high}" if low is None else f"from {low} to {high}"
        raise ConfigError(f"{key} is {value}; it must be {limit}")


def model_name(path: str, served_model_name: str) -> str:
    """Return the model name for clients: the served name, or the last part of the path.

    Engines and frontends must use the same name.
    """
    return served_model_name or path.rstrip("/").rsplit("/", 1)[-1]


def check_reuse_port(field: str, wanted: bool) -> None:
    """Raise ConfigError if ``wanted`` is set but the operating system cannot share a port between processes."""
    if wanted and not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError(f"{field} is true, but this system has no SO_REUSEPORT; set it to false")
