"""How ranks that have met agree that all of them have."""

from collections.abc import Iterable

READY, CONFIRMED = b"r", b"c"
"""This rank is connected to all others; and it knows that all others are."""
ROUNDS = len(READY + CONFIRMED)


class Confirmation:
    """What one rank has heard from the others, and may tell them. A state machine without I/O.

    Two rounds, since one is not enough: a rank that is connected to all others does not know whether they are. Once a rank has
    heard READY from all it tells CONFIRMED, and once it has heard that from all the group has formed. A rank that gives up
    before it has told CONFIRMED keeps all others from the end of the second round.
    """

    def __init__(self, peers: Iterable[int]) -> None:
        """``peers``: the other ranks."""
        self._heard = dict.fromkeys(peers, b"")
        self._told = 0

    def missing_from(self, peer: int) -> int:
        """Return how many bytes ``peer`` still has to say."""
        return ROUNDS - len(self._heard[peer])

    def hear(self, peer: int, said: bytes) -> None:
        """Take bytes from ``peer``. Raises ValueError for any that are not expected."""
        heard = self._heard[peer] + said
        if not (READY + CONFIRMED).startswith(heard):
            raise ValueError(f"rank {peer} says {heard!r} instead of that it is ready")
        self._heard[peer] = heard

    def waits_for(self) -> list[int]:
        """Return the ranks from which this one has not heard what it needs to end its present round."""
        return [peer for peer, heard in self._heard.items() if len(heard) < self._told]

    def next_word(self) -> bytes:
        """Return what to tell all others now, empty while this rank waits for them and after the last round."""
        if self.waits_for() or self._told == ROUNDS:
            return b""
        self._told += 1
        return (READY + CONFIRMED)[self._told - 1 : self._told]

    @property
    def confirmed(self) -> bool:
        """Whether this rank has said that all are ready."""
        return self._told == ROUNDS

    @property
    def over(self) -> bool:
        """Whether the group has formed."""
        return self.confirmed and not self.waits_for()
