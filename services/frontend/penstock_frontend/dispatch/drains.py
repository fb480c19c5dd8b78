"""Schedule for moving requests away from a draining engine. If possible, the KV blocks move too."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from penstock_common.observability.logging import get_logger
from penstock_frontend.dispatch.journal import Journal, JournalEntry
from penstock_frontend.dispatch.router import Candidate, Engines
from penstock_frontend.loop_yield import loop_time

# The class below decides which requests must leave a draining engine before the engine stops. The class does no I/O.

_MARGIN = 1.0
"""Maximum length of the margin, in seconds. All remaining requests leave the draining engine this long before its
deadline.
"""
_MARGIN_PART = 0.1
"""Fraction of the drain time that is used as the margin before the deadline, if the result is shorter than ``_MARGIN``."""


class Drain:
    """Estimates which requests of one draining engine will not finish in time. All times are on the event loop's clock.

    At ``deadline``, the engine ends its remaining requests. The last check of the requests is shortly before
    ``deadline``. At the last check, all remaining requests leave the engine. At each earlier check, the requests that
    would finish too late leave the engine. The estimate uses their ``max_tokens`` and their seconds per token so far.
    Each check is half-way between the previous check and the last check.
    """

    def __init__(self, now: float, time_left: float) -> None:
        self.deadline = now + time_left
        self._last_look = self.deadline - min(_MARGIN, _MARGIN_PART * time_left)

    def next_look(self, now: float) -> float | None:
        """Return the time of the next check for requests that will finish too late. Return None if the check at ``now``
        is the last check.
        """
        if now >= self._last_look:
            return None
        half = (self._last_look - now) / 2
        return now + half if half > _MARGIN else self._last_look

    def late(self, entries: Iterable[JournalEntry], now: float) -> Sequence[JournalEntry]:
        """Return the entries whose requests will not finish before the last check.

        For an entry without a measured speed, assume the median speed of the other entries.
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
    """Return the longest time in seconds until the entry's last token, at ``pace`` seconds per token.

    Return 0 if the request of the entry has no ``max_tokens``.
    """
    max_tokens = entry.request.sampling_params.max_tokens
    return 0.0 if max_tokens is None else pace * (max_tokens - len(entry.token_ids))


MOST_AT_ONCE = 8
"""Maximum number of requests that one draining engine hands over at the same time."""


class Drains:
    """Moves requests away from draining engines. ``Dispatch`` uses this class.

    While another engine accepts requests and can read the draining engine's KV blocks, the draining engine hands over a
    few requests at a time. Shortly before the draining engine stops, the remaining requests are aborted on the draining
    engine and resume on another engine. If the draining engine cannot hand its KV blocks over, requests that will not
    finish in time move earlier.

    Args:
        engines: all engines.
        journal: knows on which engine each sequence runs.
        others: returns the engines to which an entry may be sent.
        may_leave: returns True if the retry limit allows an entry one more move.
        move: called with the entries that must move to other engines, and the reason.
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
        """Timer of the next check for requests that will finish too late, by draining engine."""
        self._asked: dict[str, list[JournalEntry]] = {}
        """Entries that a draining engine was asked to hand over, and that have not resumed on another engine yet. The
        key is the draining engine.
        """

    def begin(self, engine: str, time_left: float) -> None:
        """Start to move requests away from a draining engine, which stops in ``time_left`` seconds."""
        self._asked[engine] = []
        self._check(engine, Drain(loop_time(), time_left))

    def forget(self, engine: str) -> None:
        """Stop tracking a draining engine that is lost."""
        self._asked.pop(engine, None)
        if (timer := self._timers.pop(engine, None)) is not None:
            timer.cancel()

    def look(self) -> None:
        """Ask each draining engine to hand over more requests, if fewer than ``MOST_AT_ONCE`` handovers are in
        progress.

        The caller calls this method after each frame of outputs. If no engine drains, the call returns at once.
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
            "requests of a draining engine resume on other engines",
            count=len(going),
            time_left=round(drain.deadline - now, 1),
        )
        self._engines.abort_on(engine, [entry.request_id for entry in going], f"resumed on another engine: {why}")
        self._move(going, why)

    def _ask(self, engine: str) -> bool:
        """Ask the engine to hand over more requests, at most ``MOST_AT_ONCE`` at a time. Return True if the engine can
        hand over requests.
        """
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
            get_logger().info("asked a draining engine to hand over requests", count=len(asking))
            for entry in asking:
                entry.asked_away = True
            asked += asking
            self._engines.hand_over(engine, [entry.request_id for entry in asking])
        return True

    def _fingerprint(self, engine: str) -> bytes:
        """Return the fingerprint of the engine's KV blocks. Return an empty value if no accepting engine has the same
        fingerprint.
        """
        candidates = self._engines.candidates()
        own = next((c.fingerprint for c in candidates if c.key == engine), b"")
        return own if any(c.accepting and c.fingerprint == own for c in candidates) else b""


def _under_way(entry: JournalEntry, engine: str) -> bool:
    """Return True if an entry that ``engine`` was asked to hand over has not resumed on another engine yet."""
    return not entry.ended and (entry.engine == engine or not entry.progressed)
