"""Counters in memory that processes share: advanced by one of them, and waited for by others.

A counter is a word of 32 bits. Its lowest bit says that it is closed, the others count, round and round. Who waits looks at it
for a moment and then sleeps on a futex. ``csrc/words.cpp`` does so where the package was built with a compiler; without, the
same system calls are made from here.
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
"""Seconds that a word is looked at before its waiter sleeps."""
CLOSED = 1
STEP = 2
"""What a counter grows by."""

_LIBRARY = Path(__file__).parents[2] / "native" / "kernels_baseline.so"
_FUTEX = {"x86_64": 202, "amd64": 202, "aarch64": 98, "arm64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
"""Numbers of the system call."""
_WAKE, _WAIT_BITSET, _ANY = 1, 9, 0xFFFFFFFF
_STRONGLY_ORDERED = ("x86_64", "amd64", "s390x")


class Sleepers(NamedTuple):
    """Words in which those who may sleep say that they do: ``number`` of them, ``stride`` bytes apart from ``address`` on."""

    address: int
    number: int = 1
    stride: int = 0


class Words(Protocol):
    """Each address is that of a word in memory that is shared and lives as long as the call."""

    def load(self, address: int) -> int:
        """The word. What its writer wrote before it is seen by whoever has seen the word."""

    def add(self, address: int, count: int, sleepers: Sleepers) -> None:
        """Advance the counter by ``count``, and wake who sleeps. One process at a time."""

    def close(self, address: int, sleepers: Sleepers) -> None:
        """Close the counter, and wake who sleeps. Its process, or another when that has ended."""

    def wait(self, address: int, seen: int, sleeping: int, deadline: float | None) -> bool:
        """Wait until the word is not ``seen``; False when it still is at ``deadline``, in seconds of ``time.monotonic``.
        ``sleeping``: the word in which this waiter says that it sleeps.
        """


class NativeWords:
    """By the library. A call releases the interpreter's lock, except those that cannot wait."""

    def __init__(self, path: Path | None = None, spin: float = SPIN) -> None:
        """``path``: of another library than the package's. Raises OSError where it is not there, AttributeError where it was
        built from other sources.
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
        _ = holding.penstock_ring_put  # what is built with it
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
                raise OSError(code, f"a futex cannot be waited for: {os.strerror(code)}")
            spin = 0  # the signal's handler runs between two calls
        return True


class PlainWords:
    """By libc's ``syscall``: who waits sleeps at once, and each advance makes a system call."""

    class _Time(ctypes.Structure):
        _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    def __init__(self) -> None:
        """Raises ConfigError where the system has no futex."""
        machine = platform.machine().lower()
        if sys.platform != "linux" or machine not in _FUTEX:
            raise ConfigError(
                f"executor.kind is 'multiproc', which needs Linux's futexes; this is {sys.platform} on {machine}"
            )
        self._number = ctypes.c_long(_FUTEX[machine])
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._ordered = machine in _STRONGLY_ORDERED
        self._lock = threading.Lock()  # of one process' threads, one closes while another adds

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
        asleep.value = 1  # for writers that look at it
        self._libc.getppid()  # it is there before the word is looked at
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
                    raise OSError(code, f"a futex cannot be waited for: {os.strerror(code)}")
        return True

    def _wake(self, address: int) -> None:
        everyone = ctypes.c_uint32(2**31 - 1)
        self._libc.syscall(self._number, ctypes.c_void_p(address), ctypes.c_int(_WAKE), everyone, None, None, 0)

    def _fence(self) -> None:
        if not self._ordered:
            self._libc.getppid()  # gives up the interpreter's lock and takes it again: a release, then an acquire


@functools.cache
def shared_words() -> Words:
    """The library's where there is one. Raises ConfigError where the system has no futexes."""
    plain = PlainWords()
    with contextlib.suppress(OSError, AttributeError):
        return NativeWords()
    return plain


def deadline_after(timeout: float | None) -> float | None:
    """When ``timeout`` seconds are over; None: never."""
    return None if timeout is None else time.monotonic() + timeout
