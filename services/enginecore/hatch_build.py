"""Build hook: compiles the CPU kernels in csrc/, one library per instruction set, into the package.

Where there is no C++ compiler the package is built without them, and says so; the engine then computes with torch alone.
``PENSTOCK_REQUIRE_KERNELS=1`` makes that an error.
"""

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-math-errno", "-Wno-psabi", "-pthread")
_AVX512 = ("-march=x86-64-v4", "-mprefer-vector-width=512", "-DPENSTOCK_LANES=16", "-DPENSTOCK_TILE=12")
_X86 = {
    "amx": (*_AVX512, "-mamx-tile", "-mamx-bf16", "-mavx512bf16", "-DPENSTOCK_AMX"),
    "avx512_bf16": (*_AVX512, "-mavx512bf16", "-DPENSTOCK_AVX512_BF16"),
    "avx512": _AVX512,
    "avx2": ("-march=x86-64-v3", "-DPENSTOCK_LANES=8", "-DPENSTOCK_TILE=6"),
    "baseline": ("-DPENSTOCK_LANES=4", "-DPENSTOCK_TILE=6"),
}
_OTHER = {"baseline": ("-DPENSTOCK_LANES=4", "-DPENSTOCK_TILE=8")}
_PACKAGE = "penstock_enginecore/native"


class CompileKernels(BuildHookInterface[Any]):
    """Puts ``kernels_<instruction set>.so`` beside the module that loads them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        """Compile, and name the libraries to hatchling."""
        if self.target_name != "wheel":
            return
        try:
            libraries = self._compile()
        except (OSError, subprocess.CalledProcessError) as e:
            detail = (getattr(e, "stderr", None) or str(e)).strip()
            if os.environ.get("PENSTOCK_REQUIRE_KERNELS") == "1":
                raise RuntimeError(f"the CPU kernels cannot be compiled: {detail}") from e
            self.app.display_warning(
                f"the package is built without CPU kernels, so models will run slower on CPUs: {detail}"
            )
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag()}"
        for path in libraries:
            build_data["artifacts"].append(f"{_PACKAGE}/{path.name}")

    def _compile(self) -> list[Path]:
        compiler = _compiler()
        root = Path(self.root)
        sources = [str(path) for path in sorted((root / "csrc").glob("*.cpp"))]
        kinds = _X86 if platform.machine().lower() in ("x86_64", "amd64") else _OTHER
        running = []
        for name, flags in kinds.items():
            path = root / _PACKAGE / f"kernels_{name}.so"
            command = [compiler, *_FLAGS, *flags, *sources, "-o", f"{path}.new"]
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)  # noqa: S603 - the compiler
            running.append((path, command, process))
        errors = [process.communicate()[1] for _, _, process in running]
        for (_, command, process), words in zip(running, errors, strict=True):
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, command, stderr=words)
        for path, _, _ in running:
            Path(f"{path}.new").replace(path)  # a library in use is replaced, not overwritten
        return [path for path, _, _ in running]


def _compiler() -> str:
    names = (os.environ["CXX"],) if os.environ.get("CXX") else ("c++", "g++", "clang++")
    for name in names:
        if found := shutil.which(name):
            return found
    raise FileNotFoundError(f"no C++ compiler: {', '.join(names)} not found")


def _platform_tag() -> str:
    from packaging.tags import sys_tags

    return next(
        tag.platform for tag in sys_tags() if "manylinux" not in tag.platform and "musllinux" not in tag.platform
    )
