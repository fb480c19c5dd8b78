"""What the system has to grant before instructions may be used that the processor has."""

import ctypes
import os

_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18
"""Numbers of Linux on x86-64: a system call, what it is asked to do, and for which registers."""


def request_tiles() -> None:
    """Have Linux let this process, all its threads, use the tiles of AMX. Raises OSError where it does not: a thread that
    uses them would be ended by a signal.
    """
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    if syscall(*map(ctypes.c_long, (_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA))):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
