"""Engines that drain: their requests leave in time, with their keys and values where these can move."""

import asyncio
from collections.abc import Callable, Sequence

from penstock_common.observability.logging import get_logger
from penstock_frontend.dispatch.drain_schedule import Drain
from penstock_frontend.dispatch.engines import Engines
from penstock_frontend.dispatch.journal import Journal
from penstock_frontend.dispatch.journal_entry import JournalEntry
from penstock_frontend.dispatch.router import Candidate

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
        self._check(engine, Drain(_now(), time_left))

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
        now = _now()
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


def _now() -> float:
    return asyncio.get_running_loop().time()
