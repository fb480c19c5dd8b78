"""The table of what was skipped."""

import os
import subprocess
import sys
from pathlib import Path

from tests.fakes.patience import PATIENCE
from tests.skipped import keep, kept, table

ROOT = Path(__file__).parents[3]
TESTS = """
import pytest

@pytest.mark.parametrize("number", range(3))
@pytest.mark.skipif(True, reason="no browser (install one)")
def test_a_page(number): pass

def test_a_card(): pytest.skip("no card")
"""


def run(folder: Path, *arguments: str, **environ: str) -> str:
    """What a run of pytest prints that has the project's conftest."""
    (folder / "conftest.py").write_text("from tests.conftest import pytest_terminal_summary\n")
    (folder / "test_them.py").write_text(TESTS)
    # As a run of its own: neither a worker of the one that is going on, nor a part of `make test`.
    mine = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "SKIPPED_TESTS"))}
    project = ("-c", str(ROOT / "pyproject.toml"), f"--rootdir={folder}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *project, *arguments, str(folder)],
        cwd=ROOT,
        env=mine | environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_ends_with_a_line_for_each_reason(tmp_path: Path) -> None:
    said = run(tmp_path, "-n", "1")
    assert "skipped, and why:\n     3  no browser (install one)\n     1  no card\n" in said
    assert "SKIPPED" not in said


def test_several_runs_are_told_together(tmp_path: Path) -> None:
    file = tmp_path / "build" / "skipped"
    keep({"no card": 4, "no key": 1}, file)
    assert "no card" not in run(tmp_path, "-n", "0", SKIPPED_TESTS=str(file))
    assert kept(file) == {"no browser (install one)": 3, "no card": 5, "no key": 1}


def test_nothing_is_said_where_nothing_was_skipped(tmp_path: Path) -> None:
    assert table(kept(tmp_path / "not there")) == ""
    keep({}, tmp_path / "file")
    assert table(kept(tmp_path / "file")) == ""
