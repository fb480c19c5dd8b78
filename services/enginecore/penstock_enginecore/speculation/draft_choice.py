"""How drafters with a model choose a draft: its likeliest token, or by the request's own random numbers."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock_enginecore.sample.base import FloatArray, SamplingInputs
from penstock_enginecore.speculation.base import DraftStep

# Two ways of choosing drafts, of which a request goes by the one whose drafts hold more often.

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


class DraftChoice:
    """``sampling``: ``speculative.draft_sampling``."""

    def __init__(self, sampling: str) -> None:
        self._sampling = sampling

    def first(
        self, step: DraftStep, drafting: Sequence[int], arms: Sequence[Arms], count: int
    ) -> tuple[SamplingInputs, FloatArray]:
        """How the drafts at the first place of these requests, by index, are chosen, each with its ``arms``, and the random
        numbers of the first ``count`` places, ``[count, requests]``.
        """
        n = len(drafting)
        made = step.sampling([*drafting] * count, np.repeat(np.arange(count), n))
        uniforms = made.uniforms.reshape(count, n)
        first = SamplingInputs(made.settings.of(slice(n)), uniforms[0])
        return self._by_arms(first, arms, 0), uniforms

    def inputs(self, step: DraftStep, drafting: Sequence[int], arms: Sequence[Arms], place: int) -> SamplingInputs:
        """How their drafts at a later ``place`` are chosen."""
        return self._by_arms(step.sampling(drafting, place), arms, place)

    def _by_arms(self, inputs: SamplingInputs, arms: Sequence[Arms], place: int) -> SamplingInputs:
        temperature = inputs.settings.temperature.copy()
        for row, own in enumerate(arms):
            if temperature[row] and not self._coupled(own, place):
                temperature[row] = 0.0
        return replace(inputs, settings=inputs.settings._replace(temperature=temperature))

    def _coupled(self, arms: Arms, place: int) -> bool:
        if self._sampling != "auto":
            return self._sampling == "coupled"
        return arms.choose() if place == 0 else arms.coupled


def num_held(drafts: Sequence[int], known: Sequence[int]) -> int:
    """How many of the drafts the tokens in their place have turned out to be."""
    return next(
        (n for n, (a, b) in enumerate(zip(drafts, known, strict=False)) if a != b), min(len(drafts), len(known))
    )
