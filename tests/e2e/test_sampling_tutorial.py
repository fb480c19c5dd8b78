"""Applies the changes of docs/tutorials/sampling-parameter.md to a copy of the code.

The tests that the tutorial names must pass in the copy.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import grpc_tools
import pytest
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/tutorials/sampling-parameter.md"
COPIED = ("services", "protos", "tests", "docs")
TESTS = re.compile(r"^pytest (.+)$", re.MULTILINE)


def changes(page: str) -> str:
    """Return the blocks of a page that are diffs, as one patch."""
    return "".join(re.findall(r"^```diff\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))


def copy_of_the_code(folder: Path) -> Path:
    """Copy the code that the tutorial changes, and the files that its tests need."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def stubs_of(protos: Path, out: Path) -> Path:
    """Generate Python stubs from the contracts in ``protos``."""
    out.mkdir()
    names = sorted(str(path.relative_to(protos)) for path in (protos / "penstock").rglob("*.proto"))
    wellknown = Path(grpc_tools.__file__).parent / "_proto"
    arguments = [f"-I{protos}", f"-I{wellknown}", f"--python_out={out}", f"--grpc_python_out={out}", *names]
    assert protoc.main(["protoc", *arguments]) == 0
    for folder in {
        parent for name in names for parent in (out / name).parents if parent.is_relative_to(out / "penstock")
    }:
        (folder / "__init__.py").touch()
    shutil.copy(protos / "service_config.json", out / "penstock")
    return out


def run_tests(code: Path, stubs: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, [stubs, *(code / "services").iterdir(), code]))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=code, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    return copy_of_the_code(tmp_path)


@pytest.mark.slow
def test_the_changes_of_the_tutorial_add_a_parameter(code: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    page = PAGE.read_text()
    subprocess.run(
        ["git", "apply", "-"],
        cwd=code,
        input=changes(page),
        text=True,
        check=True,
        env={**os.environ, "GIT_DIR": "none"},
    )
    stubs = stubs_of(code / "protos", tmp_path_factory.mktemp("stubs") / "out")
    (tests,) = TESTS.findall(page)
    result = run_tests(code, stubs, *tests.split())
    assert result.returncode == 0, result.stdout + result.stderr
    assert "top_a" in (code / "services/common/penstock_common/types/sampling.py").read_text()
    without = run_tests(ROOT, stubs, "tests/contract/test_sampling_fields.py")
    assert without.returncode == 1, "the new message must not go with the old struct"
