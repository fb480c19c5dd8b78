"""Values that a service reads from files, and reads again when the files change."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from penstock_common.errors import ConfigError
from penstock_common.files import read_input
from penstock_common.observability.logging import get_logger

T = TypeVar("T")

_UNSETTLED_NS = 100_000_000
"""Nanoseconds after a modification in which a second modification may leave the modification time unchanged.

The cause is that file system clocks tick only every few milliseconds.
"""
_TRY_AGAIN_AFTER = 1.0
"""Seconds after which unusable files are read again, even if the files have not changed."""

_Stamp = tuple[int, int, int, int] | None


class WatchedFiles(Generic[T]):
    """Value that ``read`` creates from files. ``current`` calls ``read`` again when a file has changed. Thread-safe.

    Changes are detected if a file is replaced, if a symbolic link gets a new target (as in Kubernetes secrets), and if
    a file is modified in place. While the new files cannot be used, the old value is kept, and each cause is logged
    once.
    """

    def __init__(self, paths: Sequence[str], read: Callable[[], T], *, what: str) -> None:
        """Read the files. ``what`` names the files in the log. Raises the ConfigError of ``read``."""
        self._paths = tuple(path for path in paths if path)
        self._read = read
        self._what = what
        self._lock = threading.Lock()
        self._problem = ""
        self._try_again_at = 0.0
        self._seen = self._stamps()
        self._value = read()

    def current(self) -> T:
        """Return the value of the current files. If the current files are unusable, return the value of the last usable
        files.
        """
        stamps = self._stamps()
        with self._lock:
            # Unusable files may become usable without a change, for example a certificate that was not valid yet.
            again = self._problem and time.monotonic() >= self._try_again_at
            if stamps != self._seen or again or _unsettled(stamps):
                self._seen = stamps
                self._renew()
            return self._value

    def _renew(self) -> None:
        try:
            value = self._read()
        except ConfigError as e:
            if str(e) != self._problem:
                get_logger().error(
                    f"{self._what}: the changed file cannot be used, so the service keeps the previous content",
                    problem=str(e),
                )
            self._problem = str(e)
            self._try_again_at = time.monotonic() + _TRY_AGAIN_AFTER
            return
        if value != self._value or self._problem:
            get_logger().info(f"{self._what}: read the changed file")
        self._value = value
        self._problem = ""

    def _stamps(self) -> tuple[_Stamp, ...]:
        return tuple(_stamp(path) for path in self._paths)


def read_bytes(path: str, *, field: str) -> bytes:
    """Return the content of a file. Raises ConfigError naming the field and the path."""
    try:
        return read_input(Path(path))
    except OSError as e:
        raise ConfigError(f"{field}: {path} cannot be read: {e.strerror or e}") from None
    except ValueError as e:
        raise ConfigError(f"{field}: {path} cannot be read: {e}") from None


def _stamp(path: str) -> _Stamp:
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _unsettled(stamps: Sequence[_Stamp]) -> bool:
    now = time.time_ns()
    return any(stamp is not None and abs(now - stamp[3]) < _UNSETTLED_NS for stamp in stamps)
