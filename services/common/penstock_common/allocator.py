"""What the C library does with memory that was freed: glibc keeps it, in up to eight heaps per core, unless it is told otherwise.

A frontend that has once held a few large messages would go on holding two or three times what it needs.
"""

import ctypes
import os

MIB = 1024 * 1024
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_ARENAS = 2
_TRIM_THRESHOLD = 4 * MIB


def use_few_arenas() -> None:
    """Let all threads allocate from two heaps. Does nothing where the C library is another one than glibc, or where the
    environment (``MALLOC_*``, ``GLIBC_TUNABLES``) says how to allocate.
    """
    _set(_M_ARENA_MAX, _ARENAS)


def give_back_large_blocks(at_least: int = MIB) -> None:
    """Let blocks of ``at_least`` bytes go back to the system as soon as they are freed, for a page fault per 4 KiB of each.
    By default the C library keeps blocks of up to 32 MiB once one of them has been freed. Does nothing where ``use_few_arenas``
    does nothing.
    """
    _set(_M_MMAP_THRESHOLD, at_least)
    _set(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2``."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def free_bytes() -> int:
    """Bytes that were freed and that the C library keeps in its heaps; 0 where it does not say."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _MallInfo
    return int(mallinfo().fordblks)


def give_back_free() -> None:
    """Give all pages back to the system that hold nothing. Does nothing where ``use_few_arenas`` does nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None and not _said_by_the_environment():
        trim(0)


def _set(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not _said_by_the_environment():
        mallopt(parameter, value)


def _said_by_the_environment() -> bool:
    return any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
