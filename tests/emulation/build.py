"""Kernels for matrix units, for processors without matrix units.

The unchanged kernel sources are compiled with the ``immintrin.h`` of this folder, when a test first needs them. The
libraries are in ``build/emulation``, in one folder for each version of the sources.
"""

import fcntl
import hashlib
import platform
from collections.abc import Iterable
from pathlib import Path

import pytest

from penstock_enginecore.native import library
from tests.sanitizers.__main__ import ENGINE, HOOK, ROOT, compile_with

HERE = Path(__file__).parent
BUILD = ROOT / "build" / "emulation"
FAST = ("-O1", "-fno-math-errno", "-DPENSTOCK_TILE=5")
"""Compiler options. They set tiles of few rows, so that a task has two strips of a matrix unit."""


def emulated(isa: str) -> Path:
    """Return the folder with ``kernels_<isa>.so``."""
    defined = [flag for flag in HOOK._X86[isa] if flag.startswith("-D") and "_TILE=" not in flag]
    return compiled(f"kernels_{isa}", sorted((ENGINE / "csrc").glob("*.cpp")), defined).parent


def compiled(name: str, sources: list[Path], options: Iterable[str] = ()) -> Path:
    """Compile ``sources`` into ``<name>.so`` for this machine's processor, and return the path."""
    native = ("-march=native",) if platform.machine().lower() in ("x86_64", "amd64") else ()
    flags = (f"-I{HERE}", "-fPIC", "-shared", "-fvisibility=hidden", *native, *FAST, *options)
    texts = sorted((*(ENGINE / "csrc").iterdir(), *HERE.iterdir()))
    said = [*flags, *map(str, sources), *(path.read_text() for path in texts if path.is_file())]
    folder = BUILD / hashlib.sha256("\0".join(said).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            if words := compile_with(flags, sources, new := folder / f"{name}.new"):
                raise AssertionError(words)
            new.replace(path)
    return path


def pretend(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    """Pretend, until the test ends, that the processor has ``isa`` and that the system allows it.

    Kernels are emulated.
    """
    monkeypatch.setattr(library, "_DIRECTORY", emulated(isa))
    monkeypatch.setitem(library._CAPABILITIES, isa, ())
    monkeypatch.setitem(library._PERMISSIONS, isa, lambda: None)
