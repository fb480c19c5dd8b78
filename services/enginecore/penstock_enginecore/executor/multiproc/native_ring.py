"""Messages of one slot, by the library (``csrc/ring.cpp``): a call to write one, one to wait and one to read.

A worker sleeps for most of a step, and what it does when a message comes is in no cache then: the fewer the steps on the way, the
sooner the message is there.
"""

import ctypes
import errno
import functools
import os
from pathlib import Path

from penstock_enginecore.executor.multiproc.futex_counter import SPIN, STEP

_SOON = -1
_INTERVALS = 16


class RingShape(ctypes.Structure):
    """Where what is in a ring's memory, and its sizes: ``Ring`` of the library."""

    _fields_ = (
        ("head", ctypes.c_void_p),
        ("written_at", ctypes.c_void_p),
        ("tails", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("num_readers", ctypes.c_int64),
        ("labels", ctypes.c_void_p),
        ("content", ctypes.c_void_p),
        ("num_slots", ctypes.c_int64),
        ("slot_bytes", ctypes.c_int64),
    )


class _Rhythm(ctypes.Structure):
    _fields_ = (
        ("sleeps", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("intervals", ctypes.c_int64 * _INTERVALS),
    )


class _Calls:
    """The library's functions. Waiting releases the interpreter's lock."""

    def __init__(self, path: Path) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        holding, releasing = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        self.put, self.take, self.wait = (
            holding.penstock_ring_put,
            holding.penstock_ring_take,
            releasing.penstock_ring_wait,
        )
        self.put.argtypes, self.put.restype = (pointer, ctypes.c_uint64, ctypes.c_char_p, number), ctypes.c_int
        self.take.argtypes, self.take.restype = (pointer, number, ctypes.c_uint64, pointer, pointer), number
        self.wait.argtypes = (pointer, number, ctypes.c_uint32, pointer, ctypes.c_int, number, number)
        self.wait.restype = ctypes.c_int


_calls = functools.cache(_Calls)


class NativeRing:
    """A ring in memory that stays mapped for as long as this lives."""

    def __init__(self, path: Path, shape: RingShape) -> None:
        """``path``: of the library."""
        self._calls = _calls(path)
        self._shape = shape
        self._address = ctypes.addressof(shape)

    def put(self, number: int, message: bytes) -> bool:
        return bool(self._calls.put(self._address, number, message, len(message)))

    def inbox(self, reader: int, *, is_early: bool) -> "NativeInbox":
        """Return the inbox of one reader."""
        return NativeInbox(self._calls, self._shape, reader, is_early=is_early)


class NativeInbox:
    """What one reader of a ring gets."""

    def __init__(self, calls: _Calls, shape: RingShape, reader: int, *, is_early: bool) -> None:
        self._take, self._wait = calls.take, calls.wait
        self._shape = shape
        self._ring = ctypes.addressof(shape)
        self._reader = reader
        self._bytes = bytearray(shape.slot_bytes)
        self._view = memoryview(self._bytes)
        self._pinned = ctypes.c_char.from_buffer(self._bytes)
        self._to = ctypes.addressof(self._pinned)
        self._rhythm = _Rhythm()
        self._beat = ctypes.addressof(self._rhythm) if is_early else None
        self._spin = int(SPIN * 1e9)

    def take(self, number: int) -> bytes | None:
        """Message ``number``; None where it is not there, or not of one slot."""
        length = self._take(self._ring, self._reader, number, self._beat, self._to)
        if length < 0:
            return None
        return self._view[:length].tobytes()

    def wait(self, seen: int, deadline: float | None, *, is_soon: bool = False) -> bool | None:
        """Wait for more than ``seen`` slots or the writer's end; False at the deadline. Where the reader is to be early,
        None, unless ``is_soon``, when the next message is due in a moment: the caller gets ready for it, and waits again.
        """
        until, spin = (-1 if deadline is None else int(deadline * 1e9)), self._spin
        while code := self._wait(self._ring, self._reader, seen * STEP, self._beat, is_soon, spin, until):
            if code == _SOON:
                return None
            if code == errno.ETIMEDOUT:
                return False
            if code != errno.EINTR:
                raise OSError(code, f"a futex cannot be waited for: {os.strerror(code)}")
            spin = 0  # the signal's handler runs between two calls
        return True
