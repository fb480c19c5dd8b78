"""The usual kernels, compiled for a GPU, pass the gate; the gate finds defects of a kernel."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fakes.models.interpreted_kernels import NO_TRITON

ROOT = Path(__file__).resolve().parents[4]

# Triton is not imported here, because a process fixes at import whether Triton interprets or compiles. These tests
# compile.
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason=NO_TRITON)

BROKEN = """
from dataclasses import replace
from tests.compiled import attention
from tests.compiled.kernel import MAX_SHARED, Usage, compile_kernel

decode = next(attention.gate())
print(compile_kernel(replace(decode, aligned=frozenset())).faults)
print(Usage(255, MAX_SHARED + 1, 8, 16, ("wgmma",)).faults)
"""


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run in a process that does not interpret kernels, unless ``variables`` set it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_the_usual_configurations_have_no_fault() -> None:
    done = run("-m", "tests.compiled", "--gate")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| none |") >= 5
    # A kernel without loops, with its instructions, and how many of them run for each logit.
    assert re.search(r"\| tallies, bf16 \|.*\| \d{4} \| \d{2,3} \| none \|", done.stdout), done.stdout


def test_missing_alignment_and_spills_and_too_much_memory_are_faults_of_a_kernel() -> None:
    done = run("-c", BROKEN)
    assert done.returncode == 0, done.stderr
    unaligned, other = done.stdout.splitlines()
    assert unaligned != "[]"
    assert all(word in other for word in ("no wgmma", "8 bytes of stack", "232449 bytes of shared memory"))


def test_interpreted_kernels_are_not_compiled() -> None:
    done = run("-c", BROKEN, TRITON_INTERPRET="1")
    assert "RuntimeError: kernels are interpreted in this process (TRITON_INTERPRET=1)" in done.stderr
