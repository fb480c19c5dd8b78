"""How often a request may lose its engine, and what becomes of one that engines die of. Does no I/O."""

from collections import deque

from penstock_common.errors import Internal, RequestFailed, Unavailable
from penstock_frontend.config import RetriesConfig
from penstock_frontend.engine.journal import JournalEntry


class Retries:
    """The budget of a request, and the trial of a suspect.

    An engine that is lost may have died of any request that it had brought nothing new for: each of those gets a strike, and
    what it brings later takes its strikes away. A request one strike below the limit is a suspect. Suspects are sent out one at
    a time, each until it brings something: so the one that engines die of is found while it alone is tried, and those that
    merely were beside it go on.
    """

    def __init__(self, config: RetriesConfig) -> None:
        self._config = config
        self._on_trial: JournalEntry | None = None
        self._to_try: deque[JournalEntry] = deque()

    @property
    def num_waiting(self) -> int:
        """Suspects that wait for their turn."""
        return len(self._to_try)

    def verdict(self, entry: JournalEntry, why: str, *, blamed: bool) -> RequestFailed | None:
        """An entry is about to leave its engine, lost or not: what it ends with if it may not go on.

        ``blamed``: whether the engine failed, and may have done so because of this request.
        """
        if entry.progressed:
            entry.strikes = 0
        elif blamed:
            entry.strikes += 1
        if entry.strikes >= self._config.max_strikes:
            return Internal(
                f"{entry.strikes} engines in a row failed before they brought anything for this request, "
                f"which is retries.max_strikes; it is not tried again. The last: {why}",
                reason="QUARANTINED",
            )
        if entry.num_moves >= self._config.max_moves:
            return Unavailable(
                f"the request has lost {entry.num_moves + 1} engines; retries.max_moves is {self._config.max_moves}. "
                f"The last: {why}",
                reason="RETRIES_EXHAUSTED",
                retry_after=1.0,
            )
        return None

    def may_go(self, entry: JournalEntry) -> bool:
        """Whether an entry may be sent now; a suspect that may not comes out of ``next`` when it is its turn."""
        if entry.strikes < self._config.max_strikes - 1 or entry is self._on_trial:
            return True
        if self._on_trial is None:
            self._on_trial = entry
            return True
        self._to_try.append(entry)
        return False

    def give_up(self, entry: JournalEntry) -> list[JournalEntry]:
        """An entry found no engine in time. Returns the suspects that have waited behind it: there is none for them either."""
        if entry is not self._on_trial:
            return []
        behind = [each for each in self._to_try if not each.ended]
        self._on_trial = None
        self._to_try.clear()
        return behind

    def next(self) -> JournalEntry | None:
        """The next suspect to send, once the one on trial has brought something or ended; it is on trial then."""
        current = self._on_trial
        if current is None or not (current.ended or current.progressed):
            return None
        self._on_trial = None
        while self._to_try:
            entry = self._to_try.popleft()
            if not entry.ended:
                self._on_trial = entry
                return entry
        return None
