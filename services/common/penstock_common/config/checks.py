"""What settings are checked by beside their own ranges, and the checks of ranges where no annotation holds them."""

import functools
import socket
from collections.abc import Callable, Mapping

import msgspec

from penstock_common.config.settings import Kind, kind_of, struct_in
from penstock_common.errors import ConfigError

ENGINES_DECIDE = "set wedged_after of the engines, which alone decide and tell"
"""What is there instead of the settings ``wedged_after`` of coordinator and frontend."""


def check_fields(section: str, config: msgspec.Struct) -> None:
    """Raise ConfigError when a field of ``config`` is outside the range or the choices of its annotation.

    msgspec looks at them only where it converts; this is for ``__post_init__`` of structs that are also built by call.
    ``section`` stands in front of the fields' names in messages; empty: nothing does.
    """
    _check(config, lambda name: f"{section}.{name}" if section else name)


def check_flags(options: msgspec.Struct) -> None:
    """The same of a command's options, by their flags: ``--max-model-len``.

    Raise ConfigError, too, for a flag that has no effect: ``IDLE_WITH`` of the options names others that take its effect.
    """
    _check(options, flag_of)
    idle_with: Mapping[str, tuple[str, ...]] = getattr(options, "IDLE_WITH", {})
    defaults = {field.name: field.default for field in msgspec.structs.fields(options)}
    for name, others in idle_with.items():
        for other in others:
            if getattr(options, name) != defaults[name] and getattr(options, other) != defaults[other]:
                raise ConfigError(f"{flag_of(name)} has no effect with {flag_of(other)}; leave one of them out")


def flag_of(name: str) -> str:
    """The flag of an option."""
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
    """Raise ConfigError when a value that must be given is empty."""
    if not value:
        raise ConfigError(f"{key} is required")


def check_range(key: str, value: float | None, *, low: float | None = None, high: float | None = None) -> None:
    """Raise ConfigError unless ``low <= value <= high``. None passes: it means unset."""
    if value is None:
        return
    below = low is not None and not value >= low
    above = high is not None and not value <= high
    if below or above:
        limit = f"at least {low}" if high is None else f"at most {high}" if low is None else f"from {low} to {high}"
        raise ConfigError(f"{key} is {value}; it must be {limit}")


def model_name(path: str, served_model_name: str) -> str:
    """The name clients use: the served name, or the last part of the path. Engines and frontends must agree on it."""
    return served_model_name or path.rstrip("/").rsplit("/", 1)[-1]


def check_reuse_port(field: str, wanted: bool) -> None:
    """Raise ConfigError where ports are to be shared and the system cannot."""
    if wanted and not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError(f"{field} is true; it must be false, because this system has no SO_REUSEPORT")
