"""Schedule by which requests leave a draining engine, with their KV blocks where possible."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from penstock_common.observability.logging import get_logger
from penstock_frontend.dispatch.journal import Journal, JournalEntry
from penstock_frontend.dispatch.router import Candidate, Engines
from penstock_frontend.loop_yield import loop_time

# The schedule of one drain: which requests must leave before the engine ends them. Does no I/O.

_MARGIN = 1.0
"""Margin before the deadline at which all remaining requests leave, in seconds."""
_MARGIN_PART = 0.1
"""Margin as a fraction of the available time, used if that is shorter than ``_MARGIN``."""


class Drain:
    """Estimates which requests of one draining engine will not finish in time. Times are those of the event loop's
    clock.

    At ``deadline`` the engine ends the requests it still has. A margin before that, at the last check, all remaining
    requests leave. Requests that will take longer, by their ``max_tokens`` and their speed so far, leave earlier. The
    estimate is repeated half-way to the last check, then half-way of the rest, and so on.
    """

    def __init__(self, now: float, time_left: float) -> None:
        self.deadline = now + time_left
        self._last_look = self.deadline - min(_MARGIN, _MARGIN_PART * time_left)

    def next_look(self, now: float) -> float | None:
        """Return the time of the next check for late requests, or None if ``now`` is the last check."""
        if now >= self._last_look:
            return None
        half = (self._last_look - now) / 2
        return now + half if half > _MARGIN else self._last_look

    def late(self, entries: Iterable[JournalEntry], now: float) -> Sequence[JournalEntry]:
        """Return the entries that will not finish in time. An entry without a measured speed is assumed to have the
        median speed.
        """
        entries = list(entries)
        if now >= self._last_look:
            return entries
        paces = {entry: entry.seconds_per_token(now) for entry in entries}
        known = [pace for pace in paces.values() if pace is not None]
        if not known:
            return []
        usual, left = median(known), self._last_look - now
        return [entry for entry, pace in paces.items() if _needs(entry, usual if pace is None else pace) > left]


def _needs(entry: JournalEntry, pace: float) -> float:
    """Return the maximum number of seconds to the entry's last token, at ``pace`` seconds per token. Return 0 if it has
    no ``max_tokens``.
    """
    max_tokens = entry.request.sampling_params.max_tokens
    return 0.0 if max_tokens is None else pace * (max_tokens - len(entry.token_ids))


MOST_AT_ONCE = 8
"""Maximum number of requests in the process of being handed over per draining engine."""


class Drains:
    """Moves requests away from draining engines. ``Dispatch`` uses it.

    While another engine accepts requests and blocks of the same fingerprint, the draining engine hands requests over a
    few at a time. The remaining requests are aborted there and restarted on another engine: all of them shortly before
    the deadline, and late ones earlier if the engine cannot hand blocks over.

    Args:
        engines: the engines.
        journal: the sequences and the engines they run on.
        others: returns the engines that an entry may be sent to.
        may_leave: returns True if an entry may move once more.
        move: takes entries that must move, and the reason.
    """

    def __init__(
        self,
        engines: Engines,
        journal: Journal,
        *,
        others: Callable[[JournalEntry], Sequence[Candidate]],
        may_leave: Callable[[JournalEntry], bool],
        move: Callable[[Sequence[JournalEntry], str], None],
    ) -> None:
        self._engines = engines
        self._journal = journal
        self._others = others
        self._may_leave = may_leave
        self._move = move
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """Timer of the next check for late requests, by draining engine."""
        self._asked: dict[str, list[JournalEntry]] = {}
        """Requests that a draining engine was asked to hand over and that have not resumed yet, by engine."""

    def begin(self, engine: str, time_left: float) -> None:
        """Start to move requests away from an engine that ends its requests in ``time_left`` seconds."""
        self._asked[engine] = []
        self._check(engine, Drain(loop_time(), time_left))

    def forget(self, engine: str) -> None:
        """Stop tracking an engine that is gone."""
        self._asked.pop(engine, None)
        if (timer := self._timers.pop(engine, None)) is not None:
            timer.cancel()

    def look(self) -> None:
        """Ask draining engines for more handovers if the limit allows it. Called after outputs; cheap if no engine
        drains.
        """
        for engine in list(self._asked):
            self._ask(engine)

    def _check(self, engine: str, drain: Drain) -> None:
        if (timer := self._timers.pop(engine, None)) is not None:
            timer.cancel()
        now = loop_time()
        when = drain.next_look(now)
        if when is not None:
            self._timers[engine] = asyncio.get_running_loop().call_at(when, self._check, engine, drain)
            if self._ask(engine):
                return
        late = [entry for entry in drain.late(self._journal.on(engine), now) if self._may_leave(entry)]
        going = [entry for entry in late if any(c.accepting for c in self._others(entry))]
        if not going:
            return
        why = "the engine drains and would not finish the request in time"
        get_logger().info(
            "an engine is draining; its requests resume on other engines",
            count=len(going),
            time_left=round(drain.deadline - now, 1),
        )
        self._engines.abort_on(engine, [entry.request_id for entry in going], f"resumed on another engine: {why}")
        self._move(going, why)

    def _ask(self, engine: str) -> bool:
        """Ask the engine to hand over requests, up to the limit. Return True if it can hand over requests at all."""
        fingerprint = self._fingerprint(engine)
        if not fingerprint:
            return False
        asked = self._asked[engine] = [entry for entry in self._asked[engine] if _under_way(entry, engine)]
        room = MOST_AT_ONCE - len(asked)
        if room <= 0:
            return True
        asking = []
        for entry in self._journal.on(engine):
            if entry.asked_away or not any(c.accepting and c.fingerprint == fingerprint for c in self._others(entry)):
                continue
            asking.append(entry)
            if len(asking) == room:
                break
        if asking:
            get_logger().info("draining engine asked to hand over requests", count=len(asking))
            for entry in asking:
                entry.asked_away = True
            asked += asking
            self._engines.hand_over(engine, [entry.request_id for entry in asking])
        return True

    def _fingerprint(self, engine: str) -> bytes:
        """Return the fingerprint of the engine's blocks, or an empty value if no accepting engine has the same one."""
        candidates = self._engines.candidates()
        own = next((c.fingerprint for c in candidates if c.key == engine), b"")
        return own if any(c.accepting and c.fingerprint == own for c in candidates) else b""


def _under_way(entry: JournalEntry, engine: str) -> bool:
    """Return True if an entry that an engine was asked to hand over has not resumed yet."""
    return not entry.ended and (entry.engine == engine or not entry.progressed)
