"""How drafters with a model choose a draft: its likeliest token, or by the request's own random numbers."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock_enginecore.sample.base import FloatArray, SamplingInputs
from penstock_enginecore.speculation.bandit import Arms
from penstock_enginecore.speculation.base import DraftStep


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
