"""Counts of skipped tests by reason. Each reason says how to install the missing part.

A run of pytest ends with the table. Where several runs belong together (``make test``), ``SKIPPED_TESTS`` names a file
that takes their counts, and ``python -m tests.skipped FILE`` prints the table of them all.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

_PREFIX = "Skipped: "


def reasons(reports: Iterable[pytest.TestReport | pytest.CollectReport]) -> Counter[str]:
    """Return the number of skipped tests by reason."""
    told = [report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr) for report in reports]
    return Counter(reason.removeprefix(_PREFIX) for reason in told)


def table(counts: Mapping[str, int]) -> str:
    """A line for each reason, the most frequent one first. Empty when nothing was skipped."""
    lines = [f"{count:6}  {reason}" for reason, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    return "\n".join(["skipped, and why:", *lines]) if lines else ""


def keep(counts: Mapping[str, int], file: Path) -> None:
    """Append the counts of one run to a file with those of other runs."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(counts) + "\n")


def kept(file: Path) -> Counter[str]:
    """The counts of all runs; none when there was none."""
    if not file.exists():
        return Counter()
    return sum((Counter(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()), Counter())


def tell(reports: Iterable[pytest.TestReport | pytest.CollectReport]) -> str:
    """The table at the end of a run; empty where a file takes the counts."""
    counts = reasons(reports)
    if file := os.environ.get("SKIPPED_TESTS"):
        keep(counts, Path(file))
        return ""
    return table(counts)


if __name__ == "__main__":
    print(table(kept(Path(sys.argv[1]))), end="")
