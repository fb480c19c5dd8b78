"""Engines that drain: when their requests leave for other engines, with their KV blocks where these can move."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from penstock_common.observability.logging import get_logger
from penstock_frontend.dispatch.journal import Journal, JournalEntry
from penstock_frontend.dispatch.router import Candidate, Engines
from penstock_frontend.loop_yield import loop_time

# The schedule: which requests go on elsewhere before the engine ends them. Does no I/O.

_MARGIN = 1.0
"""Seconds before the deadline at which everything goes."""
_MARGIN_PART = 0.1
"""Of the time there is, if that is less."""


class Drain:
    """One engine's drain, on the event loop's clock. ``deadline``: when the engine ends what it still has.

    At the last look, a margin before that, everything goes. Requests whose output will take longer, as far as their
    ``max_tokens`` and their speed so far can tell, need not wait for it. Half-way to the last look, and half-way again, the guess
    is made anew.
    """

    def __init__(self, now: float, time_left: float) -> None:
        self.deadline = now + time_left
        self._last_look = self.deadline - min(_MARGIN, _MARGIN_PART * time_left)

    def next_look(self, now: float) -> float | None:
        """When to look for late ones again; None: there is nothing to look for after now."""
        if now >= self._last_look:
            return None
        half = (self._last_look - now) / 2
        return now + half if half > _MARGIN else self._last_look

    def late(self, entries: Iterable[JournalEntry], now: float) -> Sequence[JournalEntry]:
        """Those of the engine's entries that will not be done in time. What has no speed yet is taken to be as fast as others."""
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
    """Seconds to its last token at so many seconds per token, at most; 0 where nobody knows which token is the last."""
    max_tokens = entry.request.sampling_params.max_tokens
    return 0.0 if max_tokens is None else pace * (max_tokens - len(entry.token_ids))


MOST_AT_ONCE = 8
"""Requests that an engine has been asked to hand over and that nobody has gone on with yet."""


class Drains:
    """An engine that drains is asked to hand its requests over, a few at a time, while another one takes requests and blocks of
    its fingerprint. What is left a margin before the deadline, and what an engine without blocks to give will not be done with in
    time, is ended there and begins again elsewhere.

    ``others``: the engines that an entry may be sent to; ``may_leave``: whether one would go on; ``move``: takes those that have
    to, each with why.
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
        """By engine that drains: when to see again which of its requests will not be done in time."""
        self._asked: dict[str, list[JournalEntry]] = {}
        """By engine that drains: what it was asked for, until somebody has gone on with it."""

    def begin(self, engine: str, time_left: float) -> None:
        """An engine ends in so many seconds what it still has."""
        self._asked[engine] = []
        self._check(engine, Drain(loop_time(), time_left))

    def forget(self, engine: str) -> None:
        """An engine is gone."""
        self._asked.pop(engine, None)
        if (timer := self._timers.pop(engine, None)) is not None:
            timer.cancel()

    def look(self) -> None:
        """Something has come of requests: ask for more where there is room. Costs nothing while no engine drains."""
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
        why = "the engine drains and will not be done with it in time"
        get_logger().info(
            "requests leave an engine that drains", count=len(going), time_left=round(drain.deadline - now, 1)
        )
        self._engines.abort_on(engine, [entry.request_id for entry in going], f"it goes on elsewhere: {why}")
        self._move(going, why)

    def _ask(self, engine: str) -> bool:
        """Have it hand over as many as may be under way. Returns whether it hands over at all."""
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
            get_logger().info("an engine that drains hands requests over", count=len(asking))
            for entry in asking:
                entry.asked_away = True
            asked += asking
            self._engines.hand_over(engine, [entry.request_id for entry in asking])
        return True

    def _fingerprint(self, engine: str) -> bytes:
        """Of its blocks; empty where nobody could have them."""
        candidates = self._engines.candidates()
        own = next((c.fingerprint for c in candidates if c.key == engine), b"")
        return own if any(c.accepting and c.fingerprint == own for c in candidates) else b""


def _under_way(entry: JournalEntry, engine: str) -> bool:
    """Whether nobody has gone on yet with what an engine was asked for."""
    return not entry.ended and (entry.engine == engine or not entry.progressed)
