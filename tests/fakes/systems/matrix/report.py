"""Writer of the page with the matrix's table, docs/reference/failure-matrix.md."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.fakes.systems.matrix.rig import CellResult

HEAD = """\
# Failure matrix

`make matrix` writes this page. [Robustness tests](../development/robustness-tests.md#failure-matrix) describes the method.
A row is a failure, and a column is the step at which it happens. A cell has the number of streams, and after a slash the
number of wrong streams, if any.

- *failed*: streams that ended with an error.
- *duplicated*, *lost*, *differing*: streams with too many tokens, with too few tokens, or with other tokens than expected.
- *neighbours*: streams on the other engines. *disturbed*: neighbours that were wrong or had to move.
"""
WRONG = ("failed", "duplicated", "lost", "differing")


class Report:
    """Table with a row per failure: number of streams per step, and the results of the streams of all steps."""

    def __init__(self) -> None:
        self._cells: list[CellResult] = []

    def add(self, cell: CellResult) -> None:
        """Add the result of a cell."""
        self._cells.append(cell)

    def table(self) -> str:
        """Return the table as Markdown. A step's column has the number of streams and, after a slash, of wrong streams,
        if any.
        """
        steps = list(dict.fromkeys(cell.step for cell in self._cells))
        heads = ["failure", *steps, "cells", "streams", *WRONG, "neighbours", "disturbed"]
        lines = [f"| {' | '.join(heads)} |", f"|---|{'--:|' * (len(heads) - 1)}"]
        for name in dict.fromkeys(cell.failure for cell in self._cells):
            lines.append(_row(name, [cell for cell in self._cells if cell.failure == name], steps))
        lines.append(_row("**all**", self._cells, steps))
        return "\n".join(lines)

    def write(self, path: str) -> None:
        """Write the page with the table to a file. Does nothing if the path is empty."""
        if path and self._cells:
            Path(path).write_text(f"{HEAD}\n{self.table()}\n", encoding="utf-8")


def _row(name: str, cells: Sequence[CellResult], steps: Sequence[str]) -> str:
    counts = Counter(verdict.kind for cell in cells for verdict in cell.streams)
    beside = [verdict for cell in cells for verdict in cell.neighbours]
    columns = [
        *(_of_step([cell for cell in cells if cell.step == step]) for step in steps),
        len(cells),
        counts.total(),
        *(counts[kind] for kind in WRONG),
        len(beside),
        sum(verdict.kind != "right" for verdict in beside),
    ]
    return f"| {name} | {' | '.join(map(str, columns))} |"


def _of_step(cells: Sequence[CellResult]) -> str:
    verdicts = [verdict for cell in cells for verdict in cell.streams]
    wrong = sum(verdict.kind != "right" for verdict in verdicts)
    return f"{len(verdicts)} / {wrong}" if wrong else str(len(verdicts))
