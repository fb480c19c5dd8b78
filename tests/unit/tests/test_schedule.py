"""A test process that dies costs one test, and the run ends."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from xdist.workermanage import WorkerController

from tests.schedule import FileScheduling

ROOT = Path(__file__).resolve().parents[3]
CONFTEST = """
from tests.schedule import make_scheduler

def pytest_xdist_make_scheduler(config, log):
    return make_scheduler(config, log)
"""
FATAL = """
import os

def test_before():
    pass

def test_fatal():
    os._exit(1)

def test_after():
    pass
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_dead_worker_costs_one_test(tmp_path: Path, workers: int) -> None:
    """The fatal test fails, all other tests run once, and files with one test do not keep a worker waiting."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    for name in ("a", "b"):
        (tmp_path / f"test_{name}_fatal.py").write_text(FATAL)
        (tmp_path / f"test_{name}_single.py").write_text("def test_single():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "--dist", "loadfile", "-p", "no:schemathesis"]
    run = subprocess.run(
        [*command, str(tmp_path)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "2 failed, 6 passed" in run.stdout, run.stdout + run.stderr
    assert run.stdout.count("::test_fatal - worker") == 2


class _Ended:
    """Worker process that has ended. The controller does not know it yet."""

    def send_runtest_some(self, indices: list[int]) -> None:
        raise OSError(f"cannot send {len(indices)} tests")


def test_a_file_sent_to_a_worker_that_has_just_ended_is_queued_again() -> None:
    fatal, single = "test_fatal.py::test_fatal", "test_single.py::test_single"
    config: Any = SimpleNamespace(getvalue=lambda name: ["popen"])
    scheduling, ended = FileScheduling(config), cast(WorkerController, _Ended())
    scheduling.assigned_work[ended] = {"test_fatal.py": {fatal: False}}
    scheduling.registered_collections[ended] = [fatal, single]
    scheduling.workqueue["test_single.py"] = {single: False}
    scheduling._assign_work_unit(ended)
    assert not scheduling.workqueue
    assert scheduling.remove_node(ended) == fatal
    assert dict(scheduling.workqueue) == {"test_single.py": {single: False}}
