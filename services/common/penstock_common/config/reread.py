"""Settings that are read anew while a service runs: which they are, who holds them, and what differs between two configurations.

They are whole sections: those at the top of a service's configuration that are annotated with ``REREAD`` (``kinds``).
"""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import msgspec

from penstock_common.config.settings import is_reread, settings_of

T = TypeVar("T")
C = TypeVar("C", bound=msgspec.Struct)


class Reread(Generic[T]):
    """A section that may be replaced while the service runs. Who needs it keeps this, and asks for ``now`` at each use."""

    __slots__ = ("now",)

    def __init__(self, now: T) -> None:
        self.now = now


def reread_sections(config_type: type[msgspec.Struct]) -> tuple[str, ...]:
    """The keys of the sections that a service reads anew, in the order of its configuration."""
    return tuple(field.name for field in msgspec.structs.fields(config_type) if is_reread(field.type))


def with_reread(running: C, given: C) -> C:
    """What runs once ``running`` has taken from ``given`` what is read anew."""
    return msgspec.structs.replace(running, **{name: getattr(given, name) for name in reread_sections(type(running))})


def differences(one: msgspec.Struct, other: msgspec.Struct) -> dict[str, Any]:
    """The settings in which two configurations of a service differ, by their dotted keys, with the values of ``other``."""
    values, others = msgspec.to_builtins(one), msgspec.to_builtins(other)
    keys = [setting.key for setting in settings_of(type(one))]
    return {key: value for key in keys if _at(values, key) != (value := _at(others, key))}


def _at(values: Mapping[str, Any], key: str) -> Any:
    value: Any = values
    for part in key.split("."):
        value = value[part]
    return value
