"""What was sent, how it ended, and what must not have been."""

from collections import Counter, defaultdict

from tests.fuzz.rpc_calls import End

_KEPT = 20


class Tally:
    """Counts by target and status; of the problems the smallest request of each kind."""

    def __init__(self) -> None:
        self._codes: dict[str, Counter[str]] = defaultdict(Counter)
        self._problems: dict[str, tuple[int, str]] = {}
        self.num_problems = 0

    @property
    def count(self) -> int:
        """Requests that have ended."""
        return sum(sum(codes.values()) for codes in self._codes.values())

    def add(self, target: str, end: End, request: str, size: int) -> None:
        """One has ended. ``request``: what to replay it with."""
        self._codes[target][end.code] += 1
        if not end.problem:
            return
        self.num_problems += 1
        key = f"{target}: {end.problem[:160]}"
        if len(self._problems) < _KEPT or key in self._problems:
            known = self._problems.get(key)
            if known is None or size < known[0]:
                self._problems[key] = size, request

    def problems(self) -> list[str]:
        """Every kind of problem, with the smallest request that showed it."""
        return [f"{key}\n  {request}" for key, (_, request) in self._problems.items()]

    def table(self) -> str:
        """A line per target."""
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
