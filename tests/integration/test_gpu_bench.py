"""``make bench-gpu ARGS=--tiny``: every phase runs, and brings figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.gpu.__main__ import PHASES

pytestmark = pytest.mark.slow


def test_every_phase_runs_on_a_cpu(tmp_path: Path) -> None:
    numbers = tmp_path / "results.json"
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--tiny", "--json", str(numbers)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    results = json.loads(numbers.read_text())
    assert PHASES.keys() <= results.keys()
    assert [row["streams"] for row in results["passes"]["decode"]] == [1, 4]
    assert all(row["ms"] > 0 for row in results["passes"]["decode"] + results["passes"]["prefill"])
    assert all(row["same_bits"] for row in results["invariant"]["decode"] + results["invariant"]["prefill"])
    assert all(row["tokens_per_s"] > 0 for by in ("in-process", "over gRPC") for row in results["engine"][by].values())
    tables = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert not any("unmeasured" in line for line in tables)
    assert numbers.with_suffix(".png").stat().st_size > 0
