"""Which request a step fails of. A state machine: failed steps and progress in, subsets of requests to try out."""

from collections import deque
from collections.abc import Collection, Mapping

from penstock_enginecore.core.request import Request

GOOD_STEPS = 100
"""After so many steps without a failure, trials that found nobody are forgotten."""


class StepTrial:
    """The requests of a failed step are suspects, and are tried in subsets: one at a time, in steps with nobody else.

    A subset whose step fails is parted in two; a request that fails alone is to blame. A suspect that gets as far as the failed
    step would have brought it has passed, and is one of the others again. So one request of n is found in about log2(n) failed
    steps, and mostly in two, because those that began in the failed step are tried first. Steps of the suspects take turns with
    steps of all others, which a failure of the suspects therefore never names.

    Suspects are known by key, with the number of tokens that must be processed for them to pass.
    """

    def __init__(self) -> None:
        self._subsets: deque[dict[str, int]] = deque()
        self._found = False
        self._suspects_turn = True
        self._num_good_steps = 0
        self.num_unexplained = 0
        """Trials in a row in which each suspect passed alone, and failed steps that had no requests."""

    def __bool__(self) -> bool:
        """Whether there are suspects."""
        return bool(self._subsets)

    def __contains__(self, key: str) -> bool:
        return any(key in subset for subset in self._subsets)

    @property
    def subset(self) -> Collection[str]:
        """Keys of the suspects whose turn it is to be tried."""
        return self._subsets[0].keys() if self._subsets else ()

    def failed(self, targets: Mapping[str, int], *, new: Collection[str], alone: bool) -> str | None:
        """A step failed. ``targets``: its living requests, ``new``: those of them that began in it, ``alone``: whether it had
        one request only. Returns the key of the request to blame, when that is known.
        """
        for key in targets:
            self._remove(key)
        self._num_good_steps = 0
        self._suspects_turn = True
        if alone and targets:
            self._found = True
            self._conclude()
            return next(iter(targets))
        began = [key for key in targets if key in new]
        keys = began + [key for key in targets if key not in new]
        half = len(began) if 0 < len(began) < len(keys) else (len(keys) + 1) // 2
        subsets = [{key: targets[key] for key in part} for part in (keys[:half], keys[half:]) if part]
        self._subsets.extendleft(reversed(subsets))
        if not targets:
            self._found = False
            self.num_unexplained += 1
        return None

    def settle(self, requests: Mapping[str, Request]) -> None:
        """Let suspects go that have passed, or have ended. ``requests``: the living ones."""
        while self._subsets:
            subset = self._subsets[0]
            for key, target in list(subset.items()):
                request = requests.get(key)
                if request is None or request.num_processed_tokens >= target:
                    del subset[key]
            if subset:
                return
            self._subsets.popleft()
            self._conclude()

    def next_turn(self) -> bool:
        """Whether the next step is the suspects'; it is the others' after that."""
        turn, self._suspects_turn = self._suspects_turn, not self._suspects_turn
        return turn

    def step_done(self) -> None:
        """A step did not fail."""
        if self.num_unexplained and not self._subsets:
            self._num_good_steps += 1
            if self._num_good_steps >= GOOD_STEPS:
                self.num_unexplained = 0

    def _remove(self, key: str) -> None:
        for subset in self._subsets:
            subset.pop(key, None)
        self._subsets = deque(subset for subset in self._subsets if subset)

    def _conclude(self) -> None:
        if self._subsets:
            return
        self.num_unexplained = 0 if self._found else self.num_unexplained + 1
        self._found = False
