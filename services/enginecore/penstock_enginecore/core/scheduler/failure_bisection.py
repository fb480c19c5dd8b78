"""Bisection that finds the request that makes a step fail. The bisection is a state machine without I/O."""

from collections import deque
from collections.abc import Collection, Mapping

from penstock_enginecore.core.request import Request

GOOD_STEPS = 100
"""Number of steps without a failure after which ``num_unexplained`` is reset."""


class StepTrial:
    """Finds the request that makes a step fail, by trying the requests of the failed step in subsets.

    The requests of the failed step are the suspects. Each subset of suspects is tried in steps without other requests.
    If such a step fails, the subset is split in two. If a step with one suspect fails, that suspect is blamed. A
    suspect passes the trial once as many of its tokens are processed as the failed step would have reached. The search
    needs about log2(n) failed steps for n requests. Usually two failed steps are enough, because requests that began in
    the failed step are tried first. Steps of suspects alternate with steps of all other requests, so a failure of
    suspects never affects other requests.

    A subset is a dictionary. It maps the key of each suspect to the number of processed tokens at which the suspect
    passes.
    """

    def __init__(self) -> None:
        self._subsets: deque[dict[str, int]] = deque()
        self._found = False
        self._suspects_turn = True
        self._num_good_steps = 0
        self.num_unexplained = 0
        """Number of consecutive trials in which each suspect passed alone, plus the number of failed steps without
        requests.
        """

    def __bool__(self) -> bool:
        """Return whether there are suspects."""
        return bool(self._subsets)

    def __contains__(self, key: str) -> bool:
        return any(key in subset for subset in self._subsets)

    @property
    def subset(self) -> Collection[str]:
        """Keys of the suspects in the subset that is tried now."""
        return self._subsets[0].keys() if self._subsets else ()

    def failed(self, targets: Mapping[str, int], *, new: Collection[str], alone: bool) -> str | None:
        """Record a failed step. Return the key of the request to blame, if it is known.

        Args:
            targets: For each request in the step, by key, the number of processed tokens at which the request passes.
            new: Keys of the requests that began in the step.
            alone: Whether the step had only one request.
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
        """Remove suspects that have passed the trial or have ended. ``requests`` has the requests that have not ended,
        by key.
        """
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
        """Return whether the next step should compute the suspects before the other requests. The result alternates
        between calls.
        """
        turn, self._suspects_turn = self._suspects_turn, not self._suspects_turn
        return turn

    def step_done(self) -> None:
        """Record a step that did not fail."""
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
