"""How drafters with a model choose a draft: its likeliest token, or by the request's own random numbers."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.sample.base import FloatArray, RowKinds, SamplingInputs
from penstock_enginecore.spec_decode.arms import Arms
from penstock_enginecore.spec_decode.base import DraftStep


class DraftChoice:
    """``sampling``: ``speculative.draft_sampling``."""

    def __init__(self, sampling: str) -> None:
        self._sampling = sampling

    def inputs(self, step: DraftStep, drafting: Sequence[int], arms: Sequence[Arms], place: int) -> SamplingInputs:
        """How the drafts at a place of these requests, by index, are chosen, each with its ``arms``."""
        inputs = step.sampling(drafting, place)
        temperature = inputs.temperature.copy()
        for row, own in enumerate(arms):
            if temperature[row] and not self._coupled(own, place):
                temperature[row] = 0.0
        return replace(inputs, temperature=temperature)

    def _coupled(self, arms: Arms, place: int) -> bool:
        if self._sampling != "auto":
            return self._sampling == "coupled"
        return arms.choose() if place == 0 else arms.coupled


def chain_uniforms(
    step: DraftStep, drafting: Sequence[int], counts: IntArray, first: SamplingInputs, kinds: RowKinds
) -> FloatArray:
    """The random numbers of chains of ``counts`` drafts, the most first, of these requests, by index: ``[counts[0], requests]``,
    0 where none is drawn. ``first``: the inputs of the first place, of these ``kinds``.
    """
    uniforms = np.zeros((int(counts[0]), len(drafting)))
    for place in range(len(uniforms) if kinds.any_drawn else 0):
        going = [i for i, count in zip(drafting, counts, strict=True) if count > place]
        uniforms[place, : len(going)] = (step.sampling(going, place) if place else first).uniforms
    return uniforms


def num_held(drafts: Sequence[int], known: Sequence[int]) -> int:
    """How many of the drafts the tokens in their place have turned out to be."""
    return next(
        (n for n, (a, b) in enumerate(zip(drafts, known, strict=False)) if a != b), min(len(drafts), len(known))
    )
