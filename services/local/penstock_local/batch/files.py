"""The files of a batch: local ones, and what fsspec opens."""

import fcntl
import hashlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from penstock_common.errors import ConfigError
from penstock_common.private_files import open_private


def is_url(path: str) -> bool:
    """Whether it is for fsspec."""
    return "://" in path


def open_input(path: str) -> BinaryIO:
    """The file to read. Raises ConfigError."""
    try:
        if is_url(path):
            remote: BinaryIO = _fsspec().open(path, "rb").open()
            return remote
        return Path(path).open("rb")
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory, not a file of requests") from None
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror or e}") from None
    except (ValueError, ImportError) as e:  # an unknown protocol, or one whose package is missing
        raise ConfigError(f"{path} cannot be read: {e}") from None


class OutputFile:
    """Lines that are added to a file, each whole. One program may have it at a time.

    What lies behind the last line's end, which a killed program left, is cut off. A URL's lines are gathered in a file of this
    machine, which goes there when the batch is done.
    """

    def __init__(self, path: str, *, overwrite: bool) -> None:
        """Raises ConfigError for a file that cannot be written, or that another program writes."""
        self.path = path
        self.local = _gathered(path) if is_url(path) else Path(path)
        try:
            if is_url(path):
                self.local.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.fdopen(open_private(self.local), "ab+")
            else:  # may be a link, as for any other program that the user runs
                self._file = self.local.open("ab+")
        except OSError as e:
            raise ConfigError(f"{path} cannot be written: {e.strerror or e}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConfigError(f"{path} is being written by another program") from None
        if overwrite:
            self._file.truncate(0)
        self._cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def lines(self) -> Iterator[bytes]:
        """Those that are there already."""
        self._file.seek(0)
        yield from self._file

    def add(self, line: bytes) -> None:
        """One more; it is in the file when this returns, whatever then happens to this program."""
        self._file.write(line)
        self._file.flush()

    def clear(self) -> None:
        """Drop all lines."""
        self._file.truncate(0)

    def finish(self) -> None:
        """All lines are there: make them last, and bring them to their URL. Raises ConfigError."""
        os.fsync(self._file.fileno())
        if not is_url(self.path):
            return
        try:
            with _fsspec().open(self.path, "wb") as target:
                for line in self.lines():
                    target.write(line)
        except OSError as e:
            raise ConfigError(f"{self.path} cannot be written: {e}; its lines are in {self.local}") from None
        self.local.unlink()

    def remove_if_empty(self) -> None:
        """Leave no file behind that says nothing."""
        if not self.local.stat().st_size:
            self.local.unlink()

    def _cut(self) -> None:
        size = end = self._file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 65_536)
            self._file.seek(start)
            newline = self._file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            self._file.truncate(end)
        self._file.seek(0, os.SEEK_END)


def _gathered(path: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "penstock" / "batch" / f"{hashlib.sha256(path.encode()).hexdigest()[:16]}.jsonl"


def _fsspec() -> Any:
    try:
        return importlib.import_module("fsspec")
    except ImportError:
        raise ConfigError("URLs need the package fsspec: pip install 'penstock[fsspec]'") from None
