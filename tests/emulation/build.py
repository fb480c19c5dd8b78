"""The kernels for matrix units on processors that have none: their own text, compiled with the ``immintrin.h`` of this folder.

They go into ``build/emulation``, in a folder for each text that there was, and are compiled when they are first needed.
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
"""To compile: tiles of few rows, of which there are two strips of a matrix unit in a task."""


def emulated(isa: str) -> Path:
    """The folder of ``kernels_<isa>.so``."""
    defined = [flag for flag in HOOK._X86[isa] if flag.startswith("-D") and "_TILE=" not in flag]
    return compiled(f"kernels_{isa}", sorted((ENGINE / "csrc").glob("*.cpp")), defined).parent


def compiled(name: str, sources: list[Path], options: Iterable[str] = ()) -> Path:
    """``<name>.so`` of ``sources``, for this machine's processor."""
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
    """Until the test ends the processor has ``isa``, emulated, and the system lets it be used."""
    monkeypatch.setattr(library, "_DIRECTORY", emulated(isa))
    monkeypatch.setitem(library._CAPABILITIES, isa, ())
    monkeypatch.setitem(library._PERMISSIONS, isa, lambda: None)
