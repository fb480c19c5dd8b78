"""Counters in shared memory: one process advances a counter, and other processes wait until the counter changes.

A counter is a 32-bit word. The lowest bit is set if the counter is closed. The other bits count modulo 2**31. A waiter
spins for 50 microseconds, then sleeps on a futex. If the package was built with a compiler, ``csrc/words.cpp``
implements these operations. Otherwise this module makes the same system calls.
"""

import contextlib
import ctypes
import errno
import functools
import os
import platform
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple, Protocol

from penstock_common.errors import ConfigError

SPIN = 50e-6
"""Seconds for which a waiter spins before the waiter sleeps."""
CLOSED = 1
STEP = 2
"""Number that is added to a word when the counter in this word grows by one."""

_LIBRARY = Path(__file__).parents[2] / "native" / "kernels_baseline.so"
_FUTEX = {"x86_64": 202, "amd64": 202, "aarch64": 98, "arm64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
"""Number of the futex system call by processor architecture."""
_WAKE, _WAIT_BITSET, _ANY = 1, 9, 0xFFFFFFFF
_STRONGLY_ORDERED = ("x86_64", "amd64", "s390x")


class Sleepers(NamedTuple):
    """Words in shared memory in which waiters mark that they sleep: ``number`` words, ``stride`` bytes apart, starting
    at ``address``.
    """

    address: int
    number: int = 1
    stride: int = 0


class Words(Protocol):
    """Operations on words that contain counters. Each ``address`` points to a word in shared memory. The memory must
    stay mapped during a call.
    """

    def load(self, address: int) -> int:
        """Return the value of the word. The caller then also sees all memory that the writer wrote before this value."""

    def add(self, address: int, count: int, sleepers: Sleepers) -> None:
        """Advance the counter by ``count``, and wake sleeping waiters. Only one process at a time may call this method."""

    def close(self, address: int, sleepers: Sleepers) -> None:
        """Close the counter, and wake sleeping waiters.

        The process that advances the counter calls this method, or another process calls it after that process has
        ended.
        """

    def wait(self, address: int, seen: int, sleeping: int, deadline: float | None) -> bool:
        """Wait until the value of the word differs from ``seen``. Returns False at ``deadline``, a time of
        ``time.monotonic``.

        ``sleeping`` is the address of the word in which this waiter marks that it sleeps.
        """


class NativeWords:
    """Implementation of ``Words`` with the package's C++ library. Calls that can wait release the interpreter lock."""

    def __init__(self, path: Path | None = None, spin: float = SPIN) -> None:
        """Load the package's library, or the library at ``path``.

        Raises OSError if the library does not exist, and AttributeError if the library has another version.
        """
        self.path = path = path or _LIBRARY
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        holding, releasing = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        self._load, self._add, self._close = (
            holding.penstock_word_load,
            holding.penstock_word_add,
            holding.penstock_word_close,
        )
        self._wait = releasing.penstock_word_wait
        _ = holding.penstock_ring_put  # check that the library has the functions for rings, too
        self._load.argtypes, self._load.restype = (pointer,), ctypes.c_uint32
        self._add.argtypes, self._add.restype = (pointer, ctypes.c_uint32, pointer, number, number), None
        self._close.argtypes, self._close.restype = (pointer, pointer, number, number), None
        self._wait.argtypes = (pointer, ctypes.c_uint32, pointer, number, number)
        self._wait.restype = ctypes.c_int
        self._spin = int(spin * 1e9)

    def load(self, address: int) -> int:
        return int(self._load(address))

    def add(self, address: int, count: int, sleepers: Sleepers) -> None:
        self._add(address, count * STEP, *sleepers)

    def close(self, address: int, sleepers: Sleepers) -> None:
        self._close(address, *sleepers)

    def wait(self, address: int, seen: int, sleeping: int, deadline: float | None) -> bool:
        until, spin = (-1 if deadline is None else int(deadline * 1e9)), self._spin
        while code := self._wait(address, seen, sleeping, spin, until):
            if code == errno.ETIMEDOUT:
                return False
            if code != errno.EINTR:
                raise OSError(code, f"cannot wait on a futex: {os.strerror(code)}")
            spin = 0  # Python runs the handler of the signal before the next call.
        return True


class PlainWords:
    """Implementation of ``Words`` with libc's ``syscall``. Waiters sleep without spinning, and each call of ``add``
    makes a system call.
    """

    class _Time(ctypes.Structure):
        _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    def __init__(self) -> None:
        """Load libc. Raises ConfigError if the operating system has no futexes."""
        machine = platform.machine().lower()
        if sys.platform != "linux" or machine not in _FUTEX:
            raise ConfigError(
                f"executor.kind is 'multiproc', which needs Linux's futexes; this is {sys.platform} on {machine}"
            )
        self._number = ctypes.c_long(_FUTEX[machine])
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._ordered = machine in _STRONGLY_ORDERED
        self._lock = threading.Lock()  # one thread of a process may call ``close`` while another thread calls ``add``

    def load(self, address: int) -> int:
        value = ctypes.c_uint32.from_address(address).value
        self._fence()
        return value

    def add(self, address: int, count: int, sleepers: Sleepers) -> None:  # noqa: ARG002 - it cannot see who is about to sleep
        self._fence()
        with self._lock:
            word = ctypes.c_uint32.from_address(address)
            word.value = (word.value + count * STEP) & 0xFFFFFFFF
        self._wake(address)

    def close(self, address: int, sleepers: Sleepers) -> None:  # noqa: ARG002
        self._fence()
        with self._lock:
            ctypes.c_uint32.from_address(address).value |= CLOSED
        self._wake(address)

    def wait(self, address: int, seen: int, sleeping: int, deadline: float | None) -> bool:
        asleep = ctypes.c_uint32.from_address(sleeping)
        asleep.value = 1  # tells writers that this waiter sleeps
        self._libc.getppid()  # a fence: the mark must be visible before this thread reads the word
        try:
            return self._sleep(address, seen, deadline)
        finally:
            asleep.value = 0

    def _sleep(self, address: int, seen: int, deadline: float | None) -> bool:
        until = None
        if deadline is not None:
            seconds, rest = divmod(max(deadline, 0.0), 1)
            until = ctypes.byref(self._Time(int(seconds), int(rest * 1e9)))
        while self.load(address) == seen:
            words = (ctypes.c_void_p(address), ctypes.c_int(_WAIT_BITSET), ctypes.c_uint32(seen))
            if self._libc.syscall(self._number, *words, until, None, ctypes.c_uint32(_ANY)):
                code = ctypes.get_errno()
                if code == errno.ETIMEDOUT:
                    return self.load(address) != seen
                if code not in (errno.EAGAIN, errno.EINTR):
                    raise OSError(code, f"cannot wait on a futex: {os.strerror(code)}")
        return True

    def _wake(self, address: int) -> None:
        everyone = ctypes.c_uint32(2**31 - 1)
        self._libc.syscall(self._number, ctypes.c_void_p(address), ctypes.c_int(_WAKE), everyone, None, None, 0)

    def _fence(self) -> None:
        if not self._ordered:
            self._libc.getppid()  # this call releases and acquires the interpreter lock, which acts as a fence


@functools.cache
def shared_words() -> Words:
    """Return ``NativeWords`` if the package's C++ library is available, otherwise ``PlainWords``.

    Raises ConfigError if the system has no futexes.
    """
    plain = PlainWords()
    with contextlib.suppress(OSError, AttributeError):
        return NativeWords()
    return plain


def deadline_after(timeout: float | None) -> float | None:
    """Return the time of ``time.monotonic`` in ``timeout`` seconds, or None if ``timeout`` is None."""
    return None if timeout is None else time.monotonic() + timeout
