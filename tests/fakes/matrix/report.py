"""The table of the matrix."""

from collections import Counter
from pathlib import Path

from tests.fakes.matrix.rig import CellResult


class Report:
    """A row per failure: cells, and sequences by how they went."""

    def __init__(self) -> None:
        self._cells: list[CellResult] = []

    def add(self, cell: CellResult) -> None:
        """A cell is done."""
        self._cells.append(cell)

    def table(self) -> str:
        """As Markdown."""
        lines = [
            "| failure | cells | streams | failed | duplicated | lost | differing | neighbours | disturbed |",
            "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
        ]
        names = list(dict.fromkeys(cell.failure for cell in self._cells))
        for name in names:
            lines.append(self._row(name, [cell for cell in self._cells if cell.failure == name]))
        if len(names) > 1:
            lines.append(self._row("**all**", self._cells))
        return "\n".join(lines)

    def write(self, path: str) -> None:
        """Into a file; nowhere without a path."""
        if path and self._cells:
            Path(path).write_text(self.table() + "\n", encoding="utf-8")

    @staticmethod
    def _row(name: str, cells: list[CellResult]) -> str:
        counts = Counter(verdict.kind for cell in cells for verdict in cell.streams)
        beside = [verdict for cell in cells for verdict in cell.neighbours]
        wrong = (counts[kind] for kind in ("failed", "duplicated", "lost", "differing"))
        numbers = [len(cells), counts.total(), *wrong, len(beside), sum(v.kind != "right" for v in beside)]
        return f"| {name} | {' | '.join(map(str, numbers))} |"
