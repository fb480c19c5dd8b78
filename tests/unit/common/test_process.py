"""Names and CPU times of processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock_common.process import cpu_seconds, run_script
from tests.fakes.patience import PATIENCE

CODE = "from penstock_common.process import name_process; name_process('enginecore', 'engine-7'); input()"


def test_a_process_shows_what_it_is() -> None:
    with subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        shown = Path(f"/proc/{process.pid}/cmdline")
        while process.poll() is None and not shown.read_bytes().startswith(b"penstock"):
            pass
        assert shown.read_bytes().rstrip(b"\0") == b"penstock-enginecore engine-7"
        process.stdin.close()


def test_what_a_process_has_computed_is_that_of_its_threads_until_it_ends() -> None:
    before = cpu_seconds(os.getpid())
    while time.process_time() < before + 0.1:
        sum(range(1000))
    assert cpu_seconds(os.getpid()) > before
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        assert cpu_seconds(process.pid) == 0


# Helper programs that services start.


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
