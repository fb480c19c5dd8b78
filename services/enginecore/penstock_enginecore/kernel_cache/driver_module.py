"""Advance compilation of Triton's launcher, a C module that Triton otherwise compiles when a kernel first runs.
Container images lack the C compiler that this compilation needs.
"""

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path

from triton import knobs
from triton.backends import nvidia
from triton.runtime.build import compile_module_from_src

_NAME = "cuda_utils"
_LIBRARY = "libcuda.so.1"


def build_driver_module() -> Path:
    """Compile the module into Triton's cache and return its path. No GPU driver is needed.

    The module is linked to the driver's library by name. Raises RuntimeError without a C compiler.
    """
    source = (Path(nvidia.__path__[0]) / "driver.c").read_text(encoding="utf-8")
    include, libraries = (str(Path(nvidia.__path__[0]) / name) for name in ("include", "lib"))
    with tempfile.TemporaryDirectory() as folder:
        _stand_in(Path(folder))
        with contextlib.suppress(ImportError):  # the module cannot be loaded here, because loading needs a GPU driver
            compile_module_from_src(source, _NAME, [libraries, folder], [include], [_LIBRARY])
    found = sorted(Path(knobs.cache.dir).glob(f"*/{_NAME}*.so"))
    if not found:
        raise RuntimeError(f"Triton did not compile its launcher module {_NAME}")
    return found[-1]


def _stand_in(folder: Path) -> None:
    """Create an empty library with the name of the GPU driver's library, so that the linker finds this name."""
    empty = folder / "empty.c"
    empty.touch()
    compiler = os.environ.get("CC", "cc")
    made = subprocess.run(  # noqa: S603 - the compiler that Triton uses
        [compiler, "-shared", f"-Wl,-soname,{_LIBRARY}", "-o", str(folder / _LIBRARY), str(empty)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise RuntimeError(f"{compiler} cannot build a library: {made.stderr}")
