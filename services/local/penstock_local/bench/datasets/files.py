"""Files that datasets are read from: what cannot be read, or is no JSON, is told by file, line and reason."""

import json
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock_common.errors import ConfigError

T = TypeVar("T")


def read_text(file: Path, *, flag: str) -> str:
    """The text of a file. Raises ConfigError naming ``flag``, the file and the reason."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{flag}: cannot read {str(file)!r}: {getattr(e, 'strerror', None) or e}") from None


def numbered_lines(file: Path, *, flag: str) -> list[tuple[int, str]]:
    """The lines that are not empty, with their numbers from 1 on. Raises ConfigError."""
    return [(n, line) for n, line in enumerate(read_text(file, flag=flag).splitlines(), start=1) if line.strip()]


def decode(text: str | msgspec.Raw, kind: type[T], *, where: str) -> T:
    """``text`` as JSON of a type. Raises ConfigError that begins with ``where``, which names file and line or entry."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as e:
        raise ConfigError(f"{where}: {e}") from None


def decode_list(text: str, kind: type[T], *, where: str, what: str) -> list[T]:
    """A JSON list whose entries are of one type. Raises ConfigError: the text is no list of ``what``, or which entry is wrong."""
    try:
        entries = msgspec.json.decode(text, type=list[msgspec.Raw])
    except msgspec.ValidationError as e:
        raise ConfigError(f"{where}: it is no list of {what}: {e}") from None
    except msgspec.DecodeError as e:
        raise ConfigError(f"{where}{_place(text)}: it is no list of {what}: {e}") from None
    return [decode(entry, kind, where=f"{where}, entry {n}") for n, entry in enumerate(entries, start=1)]


def _place(text: str) -> str:
    """The line in which a text is no JSON."""
    try:
        json.loads(text)
    except json.JSONDecodeError as e:
        return f", line {e.lineno}"
    return ""
