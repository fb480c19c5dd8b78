"""What settings are checked by, and sizes as people write them."""

import re
import socket
from collections.abc import Sequence
from typing import Annotated

import msgspec

from penstock_common.errors import ConfigError, nearest

ByteSize = Annotated[int, msgspec.Meta(extra={"kind": "bytes"})]
"""A number of bytes. Files, flags and environment may say ``512MiB``, ``2GB`` or a plain integer."""

ENGINES_DECIDE = "set wedged_after of the engines, which alone decide and tell"
"""What is there instead of the settings ``wedged_after`` of coordinator and frontend."""

_UNITS = {"": 1, "B": 1}

for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}IB": 1024**_power, f"{_letter}B": 1000**_power}


def parse_bytes(text: str | int, *, key: str = "size") -> int:
    """Bytes in ``text``. K, M, G, T and KiB.. count in 1024s, KB.. in 1000s. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(f"{key}: {text!r} is not a size; write a number of bytes or e.g. 512MiB, 4GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


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


def check_choice(key: str, value: str, known: Sequence[str]) -> None:
    """Raise ConfigError unless ``value`` is one of ``known``."""
    if value not in known:
        raise ConfigError(f"{key} is {value!r}; known: {', '.join(known)}{nearest(value, known)}")


def model_name(path: str, served_model_name: str) -> str:
    """The name clients use: the served name, or the last part of the path. Engines and frontends must agree on it."""
    return served_model_name or path.rstrip("/").rsplit("/", 1)[-1]


def check_reuse_port(field: str, wanted: bool) -> None:
    """Raise ConfigError where ports are to be shared and the system cannot."""
    if wanted and not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError(f"{field} is true; this system has no SO_REUSEPORT, so a port is for one process alone")
