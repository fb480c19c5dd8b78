"""The kernels' threads end with their pool, in whatever order the system suspends them."""

import subprocess
from pathlib import Path

import pytest

from tests.sanitizers.__main__ import ENGINE, compile_with


@pytest.mark.slow
def test_threads_that_wake_as_their_pool_ends_do_not_miss_it(tmp_path: Path) -> None:
    """A thread that misses the end makes the program hang. The timeout is sixty times the usual duration."""
    program = tmp_path / "lives"
    sources = [Path(__file__).with_name("lives.cpp"), ENGINE / "csrc" / "pool.cpp"]
    assert compile_with((), sources, program) is None
    done = subprocess.run([program, "20000"], check=True, capture_output=True, text=True, timeout=300)
    assert done.stdout == "every pool ended\n"
