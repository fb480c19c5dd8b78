"""How the drafts of one request have held."""

_FIRST_REST, _LONGEST_REST = 32, 512
_SLOWEST, _QUICKEST = 0.12, 0.5
_SHARED_RATE = 0.02
TRIAL = 2
"""Drafts of a try."""


class Prior:
    """How drafts held at each place, over all requests: what a new request begins with."""

    def __init__(self, num_places: int, held: float = 0.6) -> None:
        self.held = [held] * num_places


class DraftHistory:
    """The probability that a draft holds, by its place, where those before it held. A request whose drafts do not pay rests
    for 32 tokens, tries again, and rests twice as long each time, up to 512 tokens.
    """

    __slots__ = ("_counts", "_prior", "held", "next_rest", "rest_left", "tries")

    def __init__(self, prior: Prior) -> None:
        self._prior = prior
        self.held = prior.held.copy()
        self._counts = [0] * len(self.held)
        self.rest_left = 0
        self.next_rest = _FIRST_REST
        self.tries = False
        """Whether a rest is over, and its next drafts are to show whether it need not rest again."""

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """Of ``num_drafted`` drafts the first ``num_accepted`` held."""
        held, shared, counts = self.held, self._prior.held, self._counts
        for place in range(min(num_drafted, num_accepted + 1, len(held))):
            found = 1.0 if place < num_accepted else 0.0
            counts[place] += 1
            rate = _QUICKEST if self.tries else max(_SLOWEST, 1 / (counts[place] + 2))
            held[place] += rate * (found - held[place])
            shared[place] += _SHARED_RATE * (found - shared[place])
        if self.tries and num_drafted:
            self.tries = False
        if num_accepted:
            self.next_rest = _FIRST_REST

    def passed(self, num_tokens: int) -> None:
        """So many tokens came without drafts."""
        if self.rest_left:
            self.rest_left -= num_tokens
            if self.rest_left <= 0:
                self.rest_left = 0
                self.tries = True

    def rest(self) -> None:
        """Its drafts do not pay."""
        self.rest_left, self.next_rest = self.next_rest, min(2 * self.next_rest, _LONGEST_REST)
        self.tries = False
