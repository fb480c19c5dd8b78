"""Two ways of choosing drafts, of which a request goes by the one whose drafts hold more often."""

_TRIES = 6
_AGAIN = 24
_RATE = 0.15


class Arms:
    """``coupled``: the drafter draws with the request's own random numbers, which gives the model's token where the two
    distributions are alike; else it takes its likeliest token. Both are tried in turns, then the better one, now and then the
    other.
    """

    def __init__(self) -> None:
        self._held = {True: 0.0, False: 0.0}
        self._counts = {True: 0, False: 0}
        self._proposals = 0
        self.coupled = True

    def choose(self) -> bool:
        """Whether the next drafts are coupled."""
        self._proposals += 1
        better = self._held[True] >= self._held[False]
        if min(self._counts.values()) < _TRIES:
            self.coupled = self._counts[True] <= self._counts[False]
        else:
            self.coupled = better if self._proposals % _AGAIN else not better
        return self.coupled

    def held(self, num_drafted: int, num_accepted: int) -> None:
        """Of the last drafts so many held."""
        arm = self.coupled
        self._counts[arm] += 1
        rate = max(_RATE, 1 / self._counts[arm])
        self._held[arm] += rate * (num_accepted / num_drafted - self._held[arm])
