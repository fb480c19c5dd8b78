"""``make bench-gpu ARGS=--tiny``: every phase runs and reports numbers, although some rows fail, hang or print."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.gpu.phases import PHASES
from tests.device.records import FILE, read

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
FAULTS = ("kernels/prompt=raise", "lora/down, 4 rows=hang", "passes/verify=print", "invariant/decode 4=die")


def test_every_phase_runs_on_a_cpu(tmp_path: Path) -> None:
    done = run(tmp_path, "--tiny")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    results = read(tmp_path / FILE)
    assert not results.errors
    assert not results.unrun
    assert {phase.name for phase in PHASES} - {"compile"} == {phase for phase, _ in results.found}
    for name in ("decode 1 x 64", "decode 4 x 64", "prompt of 64"):
        assert all(
            found is not None and found["ms"] > 0
            for found in (results.get("passes", name), results.get("kernels", name))
        )
    assert all(found["same_bits"] for row, found in results.of("invariant").items() if row != "build model")
    rates = [found["tokens_per_s"] for row, found in results.of("engine").items() if row.endswith("streams")]
    assert len(rates) == 4
    assert min(rates) > 0
    missing = {
        line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("|") and "unmeasured" in line
    }
    # A CPU has no graphs. The first two rows measure steps without graphs, and steps with filters on the device.
    assert missing == {"1", "4", "passes", "invariant", "lora", "mixtures", "engine", "vllm"}
    assert (tmp_path / "decode.png").stat().st_size > 0
    assert done.stdout.splitlines()[-1].startswith("OK: ")


def test_rows_that_fail_hang_die_or_print_take_no_others_along(tmp_path: Path) -> None:
    faults = [word for fault in FAULTS for word in ("--fault", fault)]
    only = [word for name in ("kernels", "lora", "passes", "invariant") for word in ("--only", name)]
    done = run(tmp_path, "--tiny", *faults, *only, "--limit", "100")
    assert done.returncode == 1
    results = read(tmp_path / FILE)
    assert results.errors.keys() == {
        ("kernels", "prompt of 64"),
        ("kernels", "prompt of 64 by cuDNN"),
        ("lora", "down, 4 rows, 2 of rank 4"),
        ("invariant", "decode 4 x 64"),
    }
    assert not results.unrun
    assert len(results.of("passes")) == 8
    assert {"down, 64 rows, 2 of rank 4", "gate_up, 64 rows, 2 of rank 4"} <= results.of("lora").keys()
    assert {"decode 1 x 64", "prompt of 64"} <= results.of("invariant").keys()
    assert done.stdout.splitlines()[-1].startswith("FAILED: 4 rows failed: ")


def test_checks_run_by_the_same_program(tmp_path: Path) -> None:
    done = run(tmp_path, "--checks", "--tiny", "--only", "float32 llama", "--only", "draws", "--jobs", "2")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert {"float32 llama", "draws"} <= read(tmp_path / FILE).of("checks").keys()


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "tests/device/bare.py", "run", "--installed", *words, "--out", str(folder)]
    return subprocess.run(program, check=False, capture_output=True, text=True, cwd=ROOT)
