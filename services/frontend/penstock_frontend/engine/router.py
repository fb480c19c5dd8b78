"""Which engine serves a request."""

from collections.abc import Iterable, Sequence

import msgspec

from penstock_common.errors import InvalidArgument, Unavailable

_WAITING_WEIGHT = 4
_KV_PRESSURE_FROM = 0.5
_KV_PRESSURE_WEIGHT = 64.0
"""At a full KV cache an engine counts as if it ran half this many more requests."""


class Candidate(msgspec.Struct, frozen=True):
    """An engine that a request may go to."""

    key: str
    """Its address."""
    rank: int | None
    """Under which requests may name it; None: under none."""
    accepting: bool = True
    """Connected, and neither draining nor wedged."""
    variant: str = ""
    """Its ``config_hash``."""


class Load(msgspec.Struct):
    """The router's copy of an engine's counts; requests sent to it since the last report count as waiting."""

    waiting: int = 0
    running: int = 0
    kv_cache_usage: float = 0.0

    @property
    def score(self) -> float:
        """Grows with waiting (x4) and running requests, and further as KV usage passes one half."""
        pressure = max(0.0, self.kv_cache_usage - _KV_PRESSURE_FROM)
        return _WAITING_WEIGHT * self.waiting + self.running + _KV_PRESSURE_WEIGHT * pressure


class Router:
    """Picks the engine with the lowest load; does no I/O.

    Ties rotate, from a start that should differ between frontends, so that idle engines are not all given the same first.
    """

    def __init__(self, start: int = 0) -> None:
        self._turn = start
        self._loads: dict[str, Load] = {}
        self._sent: dict[str, set[str]] = {}
        """By engine, the requests sent to it that no report has counted yet."""

    def report(self, key: str, *, waiting: int, running: int, kv_cache_usage: float) -> None:
        """An engine's counts are known anew."""
        self._loads[key] = Load(waiting, running, kv_cache_usage)
        self._sent.pop(key, None)

    def sent(self, key: str, request_id: str) -> None:
        """A request is on its way to an engine: it counts as waiting there until the next report, or until it has left."""
        self._sent.setdefault(key, set()).add(request_id)
        self.load(key).waiting += 1

    def left(self, key: str, request_id: str) -> None:
        """A request has ended on an engine, or gone on elsewhere: unless a report has counted it, it is counted no longer."""
        sent = self._sent.get(key)
        if sent is not None and request_id in sent:
            sent.remove(request_id)
            self.load(key).waiting -= 1

    def forget(self, key: str) -> None:
        """An engine is gone."""
        self._loads.pop(key, None)
        self._sent.pop(key, None)

    def keep_only(self, keys: Iterable[str]) -> None:
        """These are all engines there are."""
        for key in self._loads.keys() - set(keys):
            self.forget(key)

    def load(self, key: str) -> Load:
        """The copy of an engine's counts."""
        return self._loads.setdefault(key, Load())

    def pick(self, candidates: Sequence[Candidate], *, rank: int | None = None, variant: str | None = None) -> str:
        """The key of the engine for what is to be ``sent`` next.

        ``variant``: the one they began on; an engine of another is only for where none of it takes requests. Raises Unavailable
        when no engine takes requests, InvalidArgument when there is no engine of that rank.
        """
        usable = [c for c in candidates if c.accepting and rank in (None, c.rank)]
        if not usable:
            raise _no_engine(candidates, rank)
        if variant is not None:
            usable = [c for c in usable if c.variant == variant] or usable
        self._turn += 1
        turn = self._turn % len(usable)
        rotated = usable[turn:] + usable[:turn]
        return min(rotated, key=lambda c: self.load(c.key).score).key


def _no_engine(candidates: Sequence[Candidate], rank: int | None) -> Unavailable | InvalidArgument:
    known = sorted({c.rank for c in candidates if c.rank is not None})
    if rank is not None and known and rank not in known:
        return InvalidArgument(
            f"routing.data_parallel_rank is {rank}; ranks now: {', '.join(map(str, known))}",
            field="routing.data_parallel_rank",
        )
    whose = "no engine takes requests now" if rank is None else f"the engine of rank {rank} takes no requests now"
    return Unavailable(whose, retry_after=1.0)
