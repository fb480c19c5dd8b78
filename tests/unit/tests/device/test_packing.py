"""Packs: which packages, how they are compressed and unpacked, and that nothing else is imported."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.device import environment, packing

ROOT = Path(__file__).resolve().parents[4]


def wheel(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, data in files.items():
            file.writestr(name, data)
    return path


def test_packages_that_only_the_image_needs_are_left_out() -> None:
    found = packing.missing(packing.IMAGE)
    assert {"msgspec", "greenlet", "xgrammar", "grpcio", "structlog", "starlette", "peft"} <= found.keys()
    assert not found.keys() & packing.IMAGE
    assert not {name for name in found if name.startswith(("penstock", "nvidia"))}
    assert found.keys() - packing.missing(packing.IMAGE | {"xgrammar"}).keys() >= {
        "xgrammar",
        "apache-tvm-ffi",
        "pydantic",
    }
    assert all(version == packing.pinned()[name] for name, version in found.items())


def test_a_wheel_is_the_same_when_it_is_repacked_and_unpacked(tmp_path: Path) -> None:
    large = b"machine code" * 10_000
    old = wheel(
        tmp_path / "some-1.0-py3-none-any.whl",
        {
            "some/__init__.py": b"VALUE = 1\n",
            "some/core.so": large,
            "some/core.pyi": b"VALUE: int\n",
            "some-1.0.data/platlib/some/more.py": b"MORE = 2\n",
            "some-1.0.data/headers/some.h": b"int some;\n",
        },
    )
    pack = tmp_path / "pack"
    pack.mkdir()
    packing.repack(old, pack / old.name)
    assert (pack / old.name).stat().st_size < len(large)
    packing.unpack(pack, tmp_path / "site")
    files = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*") if path.is_file()}
    assert files == {".unpacked", "some/__init__.py", "some/core.so", "some/more.py"}
    assert (tmp_path / "site/some/core.so").read_bytes() == large


def test_a_pack_is_unpacked_again_when_it_has_changed(tmp_path: Path) -> None:
    wheel(tmp_path / "a.whl", {"a.py": b"1"})
    packing.unpack(tmp_path, tmp_path / "site")
    (tmp_path / "site/a.py").write_text("kept")
    packing.unpack(tmp_path, tmp_path / "site")
    assert (tmp_path / "site/a.py").read_text() == "kept"
    wheel(tmp_path / "b.whl", {"b.py": b"2"})
    packing.unpack(tmp_path, tmp_path / "site")
    assert (tmp_path / "site/a.py").read_text() == "1"
    assert (tmp_path / "site/b.py").exists()


def test_a_folder_without_wheels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"run `bare.py pack` where there is a package index"):
        packing.unpack(tmp_path, tmp_path / "site")


def test_services_that_run_from_their_folders_have_versions(tmp_path: Path) -> None:
    environment.describe_services(tmp_path)
    metadata = (tmp_path / "penstock_frontend-0.1.0.dist-info/METADATA").read_text()
    assert "Name: penstock-frontend\nVersion: 0.1.0\n" in metadata


def test_the_first_process_imports_the_standard_library_alone() -> None:
    program = (
        "import runpy, sys; sys.argv = ['bare.py', 'report', '--help']\n"
        "try: runpy.run_path('tests/device/bare.py', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "names = {name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)\n"
        "print(sorted(name for name in names if not name.startswith('_')))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['tests']"


@pytest.mark.slow
def test_phases_and_services_import_nothing_that_a_bare_machine_lacks() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _IMPORTS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


_IMPORTS = """
import importlib, importlib.util, sys
from importlib.metadata import packages_distributions, requires
from packaging.requirements import Requirement
from tests.device import packing, check_phases
from tests.benchmarks.gpu import phases
from tests.device.phases import Settings

there, waiting = set(), [*packing.IMAGE, *packing.missing(packing.IMAGE)]
while waiting:
    if (name := packing.normalized(waiting.pop())) not in there:
        there.add(name)
        if name in packing.pinned():
            needs = map(Requirement, requires(name) or [])
            waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
lacking = {
    module
    for module, names in packages_distributions().items()
    if not {packing.normalized(name) for name in names} & there and not module.startswith(("penstock", "_"))
}

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in lacking:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.partition(".")[0] in lacking else find_spec(name, package)
sys.meta_path.insert(0, Lacking())
assert "torchvision" in lacking, lacking
for phase in [*phases.PHASES, *check_phases.PHASES]:
    assert phase.load(Settings("tiny", True)) or phase.name == "compile"
for name in ("penstock_frontend.__main__", "penstock_enginecore.__main__", "tests.device.session", "tests.benchmarks.gpu.report"):
    importlib.import_module(name)
"""
