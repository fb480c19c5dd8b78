"""Packs: which packages, how they are compressed and unpacked, and that nothing else is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]


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
