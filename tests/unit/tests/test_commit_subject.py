"""Which subjects of commits are taken."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commit_subject import LONGEST, faults

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "subject",
    [
        "scheduler: name the reasons a request is held",
        "structured output: count a compile by processor time",
        "docs/api: pass the limits on",
        "kernels: embed the version",
        "Merge branch 'main' into chaos",
        'Revert "scheduler: name the reasons a request is held"',
        "fixup! scheduler: name the reasons",
        "engine: drop ".ljust(LONGEST, "x"),
    ],
)
def test_a_part_and_a_verb_in_the_imperative_are_taken(subject: str) -> None:
    assert faults(f"{subject}\n\nWhy.\n") == []


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("engine: drop ".ljust(LONGEST + 1, "x"), "73 characters"),
        ("Name the reasons a request is held", "not of the form"),
        ("scheduler: Name the reasons", "not of the form"),
        ("scheduler: name the reasons.", "not of the form"),
        ("scheduler: named the reasons", "'named'"),
        ("scheduler: naming the reasons", "'naming'"),
        ("scheduler: names the reasons", "'names'"),
        ("scheduler: the reasons have names", "'the'"),
        ("", "not of the form"),
    ],
)
def test_other_subjects_are_refused_with_the_reason(subject: str, fault: str) -> None:
    (told,) = faults(f"{subject}\n\nWhy.\n")
    assert fault in told


@pytest.mark.parametrize(("subject", "code"), [("docs: link the glossary", 0), ("Docs.", 1)])
def test_the_hook_refuses_by_its_exit_code(tmp_path: Path, subject: str, code: int) -> None:
    file = tmp_path / "COMMIT_EDITMSG"
    file.write_text(subject)
    hook = [sys.executable, "-m", "tests.commit_subject", str(file)]
    run = subprocess.run(hook, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == code
    assert bool(run.stderr) == bool(code)
