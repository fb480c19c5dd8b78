"""Which requests of an engine that drains go on elsewhere before it ends them. Does no I/O."""

from collections.abc import Iterable, Sequence
from statistics import median

from penstock_frontend.dispatch.journal_entry import JournalEntry

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
