"""Removes CUDA's libraries from an environment with torch, so that the image fits on test nodes.

Run ``python without_cuda.py ENVIRONMENT`` where a C compiler is available. torch loads these libraries at import, even
without a GPU. This script replaces each library by a small one with the same name and the same symbols. The functions
do nothing, because computations on the CPU never call them. CUDA's runtime stays, because torch uses it to count the
devices. triton, which compiles for GPUs, is removed.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

KEPT = ("libcudart.so",)
SMALL = 2**20
"""Size in bytes up to which a library is not replaced."""
UNUSED = ("triton", "nvidia/*/include", "nvidia/*/bin", "nvidia/*/nvvm")


def exported(library: Path) -> dict[str, list[str]]:
    """Return the symbols of a library by their version; "" for those without. Weak C++ symbols are left out: they are
    template instances, which other libraries define too.
    """
    said = subprocess.run(["readelf", "--dyn-syms", "--wide", str(library)], check=True, capture_output=True, text=True)
    symbols: dict[str, list[str]] = {}
    for line in said.stdout.splitlines():
        fields = line.split()
        if len(fields) < 8 or fields[4] not in ("GLOBAL", "WEAK") or fields[6] in ("UND", "ABS"):
            continue
        name, _, version = fields[7].replace("@@", "@").partition("@")
        if fields[4] == "WEAK" and name.startswith("_Z"):
            continue
        symbols.setdefault(version, []).append(name)
    return symbols


def soname(library: Path) -> str:
    """Return the library's soname, by which other libraries load it."""
    said = subprocess.run(["readelf", "--dynamic", str(library)], check=True, capture_output=True, text=True)
    found = re.search(r"SONAME.*\[(.+)\]", said.stdout)
    return found[1] if found else library.name


def hollow(library: Path) -> None:
    """Replace the library by a small one with the same symbols."""
    symbols = exported(library)
    labels = sorted({name for names in symbols.values() for name in names})
    assembly = "".join(f".globl {name}\n.type {name}, @function\n{name}:\n" for name in labels)
    versions = "".join(
        f"{version} {{ global: {' '.join(f'{name};' for name in names)} }};\n"
        for version, names in symbols.items()
        # The linker accepts no other version names. Callers find the symbols without a version.
        if re.fullmatch(r"[\w.]+", version)
    )
    with tempfile.TemporaryDirectory() as directory:
        source, script = Path(directory) / "hollow.s", Path(directory) / "versions"
        source.write_text(f'.text\n{assembly}\txorl %eax, %eax\n\tret\n.section .note.GNU-stack,"",@progbits\n')
        script.write_text(versions)
        name = soname(library)
        library.unlink()
        command = ["gcc", "-shared", "-nostdlib", f"-Wl,-soname,{name}", "-o", str(library), str(source)]
        subprocess.run([*command, *([f"-Wl,--version-script={script}"] if versions else [])], check=True)


def main() -> None:
    """Replace and remove the libraries of an environment, then check that torch can still be imported."""
    environment = Path(sys.argv[1])
    (packages,) = environment.glob("lib/python3.*/site-packages")
    for pattern in UNUSED:
        for folder in packages.glob(pattern):
            shutil.rmtree(folder)
    for library in sorted(packages.glob("nvidia/**/*.so*")):
        if not library.is_symlink() and library.stat().st_size > SMALL and not library.name.startswith(KEPT):
            hollow(library)
    check = "import torch; print(torch.__version__, float(torch.ones(3).sum()), torch.cuda.is_available())"
    subprocess.run([environment / "bin" / "python", "-c", check], check=True)


if __name__ == "__main__":
    main()
