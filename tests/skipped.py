"""Counts of skipped tests by reason. Each reason says how to install the missing part.

A run of pytest prints the table at its end. For several runs that belong together (``make test``), ``SKIPPED_TESTS``
names a file that collects their counts. Then ``python -m tests.skipped FILE`` prints one table for all runs.
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
    """Return a table with a line for each reason, most frequent first. Empty if no tests were skipped."""
    lines = [f"{count:6}  {reason}" for reason, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    return "\n".join(["skipped, and why:", *lines]) if lines else ""


def keep(counts: Mapping[str, int], file: Path) -> None:
    """Append the counts of one run to a file with those of other runs."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(counts) + "\n")


def kept(file: Path) -> Counter[str]:
    """Return the sum of the counts of all runs. Empty if the file does not exist."""
    if not file.exists():
        return Counter()
    return sum((Counter(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()), Counter())


def tell(reports: Iterable[pytest.TestReport | pytest.CollectReport]) -> str:
    """Return the table at the end of a run. If ``SKIPPED_TESTS`` is set, save the counts and return an empty string."""
    counts = reasons(reports)
    if file := os.environ.get("SKIPPED_TESTS"):
        keep(counts, Path(file))
        return ""
    return table(counts)


if __name__ == "__main__":
    print(table(kept(Path(sys.argv[1]))), end="")
