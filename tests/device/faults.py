"""Faults on demand, to show that a run survives them: ``--fault "kernels/prompt=hang"``."""

import os
import signal
import sys
import time
from collections.abc import Callable


def _raise() -> None:
    raise RuntimeError("made to fail")


def _hang() -> None:
    while True:
        time.sleep(3600)


def _print() -> None:
    print('{"kind": "row"', "a stray line that is no JSON", flush=True)
    print("and one on stderr", file=sys.stderr, flush=True)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _poison() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered (made to fail)")


KINDS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "hang": _hang,
    "print": _print,
    "die": _die,
    "poison": _poison,
}


def inject(faults: dict[str, str], phase: str, row: str) -> None:
    """Inject the faults of a row. A key of ``faults`` is a prefix of ``phase/row``."""
    for begin, kind in faults.items():
        if f"{phase}/{row}".startswith(begin):
            KINDS[kind]()
