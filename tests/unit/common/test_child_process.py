"""Programs that services start beside themselves."""

import subprocess
from pathlib import Path

import pytest

from penstock_common.process import run_script
from tests.fakes.patience import PATIENCE


def test_a_script_sees_the_standard_library_alone(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import json, sys\n"
        "try:\n    import msgspec\n    found = True\n"
        "except ImportError:\n    found = False\n"
        "print(json.dumps([found, sys.stdin.read()]), end='')\nsys.exit(3)\n"
    )
    ended = run_script(program, b"given", PATIENCE)
    assert (ended.returncode, ended.stdout) == (3, b'[false, "given"]')


def test_a_script_that_goes_on_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import time\ntime.sleep(1000)\n")
    with pytest.raises(subprocess.TimeoutExpired):
        run_script(program, b"", 0.05)
