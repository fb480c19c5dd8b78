"""Pages that claim a result on a device name the check that produced the result."""

import re
from pathlib import Path

from tests.benchmarks.gpu.phases import PHASES
from tests.device.checks import CHECKS

PAGE = Path(__file__).resolve().parents[2] / "docs/guides/gpu.md"


def rows() -> list[list[str]]:
    """Return the cells of each row of the table of tests on GPUs."""
    text = PAGE.read_text(encoding="utf-8")
    _, head, table = text.partition("| part | tested on a GPU | not tested on a GPU | by |\n|---|---|---|---|\n")
    assert head, "docs/guides/gpu.md has no table of tests on GPUs"
    lines = table.split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_each_row_names_checks_and_phases_that_there_are() -> None:
    assert len(rows()) >= 9
    for about, shown, missing, by in rows():
        checks = re.findall(r"checks? ((?:`[^`]+`(?: and )?)+)", by)
        phases = re.findall(r"phase `([^`]+)`", by)
        named = [name for part in checks for name in re.findall(r"`([^`]+)`", part)]
        assert named or phases, about
        assert set(named) <= CHECKS.keys(), about
        assert set(phases) <= {phase.name for phase in PHASES}, about
        assert shown or missing, about


def test_a_check_of_sleep_with_kept_addresses_sets_them() -> None:
    check = CHECKS["sleeps with kept addresses"]
    assert check.keywords == {"keep_addresses": True}
