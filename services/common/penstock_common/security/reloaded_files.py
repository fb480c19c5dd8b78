"""What is read from files that may be replaced while a service runs."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from penstock_common.errors import ConfigError
from penstock_common.files import read_input
from penstock_common.observability.logging import get_logger

# What is read from files that may be replaced while a service runs.

T = TypeVar("T")

_UNSETTLED_NS = 100_000_000
"""A file changed so lately may change again without a new time: clocks of file systems tick every few milliseconds."""
_TRY_AGAIN_AFTER = 1.0
"""Seconds after which files that could not be used are looked into again, changed or not."""

_Stamp = tuple[int, int, int, int] | None


class WatchedFiles(Generic[T]):
    """The value that ``read`` makes of files, made anew by ``current`` when one of them has changed. For any thread.

    Replaced files count, symbolic links that point elsewhere (Kubernetes swaps secrets so) and files written in place. While
    the new files cannot be used the old value stays, and the log says why, once per cause.
    """

    def __init__(self, paths: Sequence[str], read: Callable[[], T], *, what: str) -> None:
        """Reads the files; ``what`` names them in the log. Raises ConfigError, as ``read`` does for what it cannot use."""
        self._paths = tuple(path for path in paths if path)
        self._read = read
        self._what = what
        self._lock = threading.Lock()
        self._problem = ""
        self._try_again_at = 0.0
        self._seen = self._stamps()
        self._value = read()

    def current(self) -> T:
        """The value of the files as they are now, or as they last were usable."""
        stamps = self._stamps()
        with self._lock:
            # What could not be used may become so by itself: a certificate whose time had not begun.
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
                get_logger().error(f"{self._what}: the change is not used, what was read before stays", problem=str(e))
            self._problem = str(e)
            self._try_again_at = time.monotonic() + _TRY_AGAIN_AFTER
            return
        if value != self._value or self._problem:
            get_logger().info(f"{self._what}: read anew")
        self._value = value
        self._problem = ""

    def _stamps(self) -> tuple[_Stamp, ...]:
        return tuple(_stamp(path) for path in self._paths)


def read_bytes(path: str, *, field: str) -> bytes:
    """What a file holds. Raises ConfigError that names the field and the path."""
    try:
        return read_input(Path(path))
    except OSError as e:
        raise ConfigError(f"{field}: {path}: {e.strerror or e}") from None
    except ValueError as e:
        raise ConfigError(f"{field}: {path}: {e}") from None


def _stamp(path: str) -> _Stamp:
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _unsettled(stamps: Sequence[_Stamp]) -> bool:
    now = time.time_ns()
    return any(stamp is not None and abs(now - stamp[3]) < _UNSETTLED_NS for stamp in stamps)
