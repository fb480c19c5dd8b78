"""Packs of wheels for machines that already have torch, Triton and transformers, and the installation of packs.

Standard library only.
"""

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path("build/gpu-pack")
IMAGE = {
    *("torch", "triton", "transformers", "numpy", "safetensors", "tokenizers", "huggingface-hub", "regex", "pyyaml"),
    *("packaging", "tqdm", "jinja2", "markupsafe", "typing-extensions", "pillow"),
}
"""Packages of an image with torch and transformers, including their requirements and torchvision's requirement pillow.
"""
PROJECTS = ("common", "enginecore", "frontend", "client")
"""The services that phases import or start."""
EXTRA = ("peft",)
"""Additional packages that checks need."""
GLIBC = range(17, 40)
"""Minor versions of glibc 2 for which wheels are accepted. ``pip download`` matches each version by name."""
_LZMA_FROM = 32 * 1024
MIB = 2**20


def pack(into: Path, python: str, has: Sequence[str], limit_mib: float) -> int:
    """Collect wheels for a machine's ``python`` in the folder ``into``, and print their sizes.

    Args:
        into: Folder for the wheels, emptied first.
        python: Version, such as 3.12. The machine is x86-64 with glibc.
        has: Packages that the machine has in addition to ``IMAGE``.
        limit_mib: Maximum size of the wheels and the repository's tracked files together, in MiB.

    Returns:
        1 if the limit is exceeded, else 0.
    """
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    downloaded = into / "downloaded"
    wanted = missing(IMAGE | {normalized(name) for name in has})
    _download(wanted, python, downloaded)
    _build_protos(downloaded)
    for wheel in sorted(downloaded.glob("*.whl")):
        repack(wheel, into / wheel.name)
    shutil.rmtree(downloaded)
    wheels = sorted(into.glob("*.whl"), key=lambda path: -path.stat().st_size)
    for wheel in wheels:
        print(f"{wheel.stat().st_size / MIB:7.2f} MiB  {wheel.name}")
    packed, tree = sum(wheel.stat().st_size for wheel in wheels) / MIB, tracked_bytes() / MIB
    print(
        f"{packed:.1f} MiB of {len(wheels)} wheels in {into}, {tree:.1f} MiB of tracked files, {packed + tree:.1f} MiB in all"
    )
    if packed + tree > limit_mib:
        print(
            f"FAILED: that is more than {limit_mib:g} MiB; name packages that the machine has with --has",
            file=sys.stderr,
        )
        return 1
    return 0


def missing(there: Iterable[str]) -> dict[str, str]:
    """Return name and version of each package that the services and checks need, but the machine lacks.

    Packages that only packages in ``there`` need are left out. Requirements come from this environment's packages,
    versions from constraints.txt.
    """
    from packaging.requirements import Requirement  # not in the standard library, but in the project's environment

    there, versions = set(there), pinned()
    found: dict[str, str] = {}
    waiting = [*(f"penstock-{name}" for name in PROJECTS), *EXTRA]
    while waiting:
        name = normalized(waiting.pop())
        if name in found or name in there:
            continue
        found[name] = versions.get(name, "")
        needs = map(Requirement, distribution(name).requires or [])
        waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return {name: version for name, version in sorted(found.items()) if not name.startswith("penstock-")}


def pinned() -> dict[str, str]:
    """Return the version of each package in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    return {normalized(name): version.strip() for name, version in pairs}


def normalized(name: str) -> str:
    """Return a package's name in the normalized form of package indexes."""
    return re.sub(r"[-_.]+", "-", name).lower()


def repack(wheel: Path, to: Path) -> None:
    """Write a wheel again, without type stubs and with large files compressed by LZMA, which saves a quarter."""
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(to, "w") as new:
        for item in old.infolist():
            if item.is_dir() or item.filename.endswith((".pyi", ".pyx", ".pxd")):
                continue
            method = zipfile.ZIP_LZMA if item.file_size > _LZMA_FROM else zipfile.ZIP_DEFLATED
            new.writestr(item.filename, old.read(item), method, 9)


def unpack(pack: Path, site: Path) -> None:
    """Install the wheels of ``pack`` into the folder ``site``, unless they exist there. Raises FileNotFoundError
    without wheels.
    """
    wheels = sorted(pack.glob("*.whl"))
    if not wheels:
        raise FileNotFoundError(f"there are no wheels in {pack}: run `bare.py pack` where there is a package index")
    stamp, names = site / ".unpacked", "\n".join(f"{wheel.name} {wheel.stat().st_size}" for wheel in wheels)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == names:
        return
    shutil.rmtree(site, ignore_errors=True)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as file:
            for item in file.infolist():
                # Platform files of wheels lie next to the packages; headers and scripts are not needed.
                inside = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", item.filename)
                if not re.match(r"^[^/]+\.data/", inside):
                    target = site / inside
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(file.read(item))
    stamp.write_text(names, encoding="utf-8")


def tracked_bytes() -> int:
    """Return the size of the files that git tracks."""
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT).decode().split("\0")
    return sum((ROOT / name).lstat().st_size for name in names if name and (ROOT / name).exists())


def _download(wanted: dict[str, str], python: str, into: Path) -> None:
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in reversed(GLIBC)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(into)]
    command += ["--python-version", python, "--implementation", "cp"]
    command += [word for platform in platforms for word in ("--platform", platform)]
    subprocess.run([*command, *(f"{name}=={version}" for name, version in wanted.items())], check=True)


def _build_protos(into: Path) -> None:
    """Build the wheel of the generated contracts."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(into)]
    subprocess.run([*command, str(ROOT / "protos")], check=True)
