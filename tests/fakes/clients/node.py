"""Programs in Node that tests run."""

import shutil
import subprocess
from pathlib import Path

import pytest

needs_node = pytest.mark.skipif(
    shutil.which("node") is None or shutil.which("npm") is None,
    reason="no node and npm on PATH (apt-get install nodejs npm), which bring buf, too",
)


def install(folder: Path) -> None:
    """Install the packages of ``folder`` at their locked versions, on first use."""
    if (folder / "node_modules").is_dir():
        return
    npm = shutil.which("npm")
    assert npm is not None
    run = subprocess.run([npm, "ci"], cwd=folder, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
