"""Names of processes."""

import subprocess
import sys
from pathlib import Path

CODE = "from penstock_common.process import name_process; name_process('enginecore', 'engine-7'); input()"


def test_a_process_shows_what_it_is() -> None:
    with subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        shown = Path(f"/proc/{process.pid}/cmdline")
        while process.poll() is None and not shown.read_bytes().startswith(b"penstock"):
            pass
        assert shown.read_bytes().rstrip(b"\0") == b"penstock-enginecore engine-7"
        process.stdin.close()
