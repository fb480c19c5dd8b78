"""Dependencies of each distribution: allowed packages, and the pinned environment contains all of them."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = [*sorted(ROOT.glob("services/*/pyproject.toml")), ROOT / "protos/pyproject.toml"]


def dependencies(project: Path) -> set[str]:
    declared = tomllib.loads(project.read_text())["project"].get("dependencies", [])
    return {normalize(line) for line in declared}


def extras(project: Path) -> set[str]:
    declared = tomllib.loads(project.read_text())["project"].get("optional-dependencies", {})
    return {normalize(line) for lines in declared.values() for line in lines}


def normalize(line: str) -> str:
    return re.split(r"[\s<>=!~;\[]", line, maxsplit=1)[0].lower().replace("_", "-")


def pinned() -> set[str]:
    return {normalize(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}


@pytest.mark.parametrize("project", PROJECTS, ids=lambda p: p.parent.name)
def test_every_dependency_is_pinned_and_in_the_developers_environment(project: Path) -> None:
    asked = {normalize(line) for line in (ROOT / "requirements-dev.txt").read_text().splitlines() if line[:1].isalpha()}
    third_party = {name for name in dependencies(project) | extras(project) if not name.startswith("penstock")}
    assert third_party <= pinned()
    assert third_party <= asked


@pytest.mark.parametrize("service", ["frontend", "coordinator", "common"])
def test_distributions_without_the_model_do_not_depend_on_torch(service: str) -> None:
    assert "torch" not in dependencies(ROOT / "services" / service / "pyproject.toml")


def with_torch() -> list[str]:
    """Return the processing tests whose oracle needs torch: transformers' own processors and models.

    Tests in tests/unit/frontend/processing/media show in separate processes that the tested code itself needs no torch.
    """
    oracles = "tests.fakes.multimodal_models"
    return sorted(
        str(path)
        for path in (ROOT / "tests/unit/frontend/processing").rglob("test_*.py")
        if oracles in path.read_text()
    )


def test_prompts_are_processed_where_torch_cannot_be_imported() -> None:
    """Libraries might import torch. test_imports checks from the code that the rest of the frontend does not."""
    left_out = [f"--ignore={path}" for path in with_torch()]
    blocker = (
        "import sys, pytest\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'torch':\n"
        "            raise ModuleNotFoundError('torch is not installed here', name='torch')\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', 'tests/unit/frontend/processing', *sys.argv[1:]]))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", blocker, *left_out], cwd=ROOT, capture_output=True, text=True, timeout=1800
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]


def test_starting_the_frontend_and_the_command_does_not_import_torch_or_transformers() -> None:
    check = (
        "import sys, penstock_frontend.app.app, penstock_local.cli\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "[]", run.stdout + run.stderr
