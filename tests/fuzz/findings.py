"""Findings of a campaign: results by target, and every kind of problem once, with the requests that showed it."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from tests.fuzz.rpc_calls import End

_KEPT_NUMBERS = 6
_SUSPECTS = 32
_KEPT_KINDS = 200
_NOISE = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8,}|\d+(\.\d+)?|'[^']{12,}'|\"[^\"]{12,}\"|\\\\x..")
"""Pattern of the texts that may differ between findings of one kind: numbers, addresses and clients' texts."""


class Finding(msgspec.Struct):
    """Findings of one kind.

    Attributes:
        numbers: Numbers of the requests that caused the problem, or that include the cause.
        shown: The smallest of these requests.
    """

    variant: str
    target: str
    what: str
    count: int = 0
    numbers: list[int] = []
    shown: str = ""
    size: int = -1
    sure: bool = True

    def line(self) -> str:
        """Return a line for the report."""
        numbers = ", ".join(map(str, self.numbers)) + ("" if self.sure else " (one of these)")
        return f"[{self.variant}] {self.target}: {self.what}\n  {self.count} times; requests {numbers or '-'}\n  {self.shown}"


class Findings:
    """Counts by target and status, and the problems."""

    def __init__(self) -> None:
        self._codes: dict[str, Counter[str]] = defaultdict(Counter)
        self._found: dict[tuple[str, str, str], Finding] = {}
        self.variant = ""

    @property
    def count(self) -> int:
        """Number of ended requests."""
        return sum(sum(codes.values()) for codes in self._codes.values())

    @property
    def kinds(self) -> int:
        """Kinds of findings so far."""
        return len(self._found)

    def ended(self, target: str, end: End, number: int | None, shown: str, size: int) -> None:
        """Record the end of a request."""
        self._codes[target][end.code] += 1
        if end.problem:
            self.add(target, end.problem, [] if number is None else [number], shown, size)

    def add(self, target: str, what: str, numbers: Sequence[int] = (), shown: str = "", size: int = 0) -> None:
        """Record a wrong result. Results whose ``what`` differs only in numbers and similar texts are merged."""
        self._add((self.variant, target, _NOISE.sub("*", what)[:120]), target, what, numbers, shown, size, sure=True)

    def happened(
        self, kind: str, what: str, numbers: Sequence[int] = (), shown: str = "", size: int = 0, *, sure: bool = True
    ) -> None:
        """Record an incident of the system. Incidents of one kind are merged.

        Args:
            sure: Whether the requests in ``numbers`` are known to cause the incident.
        """
        self._add((self.variant, kind, ""), kind, what, numbers, shown, size, sure=sure)

    def _add(
        self,
        key: tuple[str, str, str],
        target: str,
        what: str,
        numbers: Sequence[int],
        shown: str,
        size: int,
        *,
        sure: bool,
    ) -> None:
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= _KEPT_KINDS:
                return
            found = self._found[key] = Finding(self.variant, target, what[:600], sure=sure)
            print(f"found: [{self.variant}] {target}: {what[:200]} {numbers if sure else ''}", flush=True)
        found.count += 1
        if sure and not found.sure:  # now the cause is known
            found.sure, found.numbers = True, []
        if sure == found.sure:
            found.numbers = [*dict.fromkeys([*found.numbers, *numbers])][: _KEPT_NUMBERS if sure else _SUSPECTS]
        if found.size < 0 or size < found.size:
            found.size, found.shown = size, shown[:1500]

    def wrong(self) -> list[str]:
        """Return a paragraph for each kind."""
        return [found.line() for found in self._found.values()]

    def rows(self) -> list[Finding]:
        """Return a row for each kind."""
        return list(self._found.values())

    def table(self) -> str:
        """Return a table with a line per target."""
        width = max(map(len, self._codes), default=10)
        lines = [f"{'target':{width}}  requests  by status"]
        for target, codes in sorted(self._codes.items()):
            counts = ", ".join(f"{code} {count}" for code, count in codes.most_common())
            lines.append(f"{target:{width}}  {sum(codes.values()):8}  {counts}")
        total = Counter[str]()
        for codes in self._codes.values():
            total += codes
        lines.append(f"{'all':{width}}  {total.total():8}  " + ", ".join(f"{c} {n}" for c, n in total.most_common()))
        return "\n".join(lines)
