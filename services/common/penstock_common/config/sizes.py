"""Sizes in bytes, as people write them."""

import re
from typing import Annotated

import msgspec

from penstock_common.errors import ConfigError

ByteSize = Annotated[int, msgspec.Meta(extra={"kind": "bytes"})]
"""A number of bytes. Files, flags and environment may say ``512MiB``, ``2GB`` or a plain integer."""

PATTERN = r"^\s*[0-9]+(\.[0-9]+)?\s*([KMGTkmgt]([Ii]?[Bb])?|[Bb])?\s*$"
"""What ``parse_bytes`` reads, as a regular expression for a JSON schema."""

_UNITS = {"": 1, "B": 1}

for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}IB": 1024**_power, f"{_letter}B": 1000**_power}


def parse_bytes(text: str | int, *, key: str = "size") -> int:
    """Bytes in ``text``. K, M, G, T and KiB.. count in 1024s, KB.. in 1000s. Raises ConfigError that names ``key``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(f"{key}: {text!r} is not a size; write a number of bytes or e.g. 512MiB, 4GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def format_bytes(size: int) -> str:
    """What ``parse_bytes`` reads as ``size``, in the largest unit of which it is a whole number."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _UNITS[unit.upper()] == 0:
            return f"{size // _UNITS[unit.upper()]}{unit}"
    return str(size)
