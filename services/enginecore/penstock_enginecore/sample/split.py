"""Sampling from logits of which every rank has some columns."""

import torch

from penstock_enginecore.parallel.part import SplitVocabulary
from penstock_enginecore.sample.base import SampledTokens, Sampler, SamplingInputs
from penstock_enginecore.sample.blocks import peak


class SplitSampler:
    """A ``Sampler`` of logits that are whole, or of this rank's columns alone: where all rows are greedy and nothing is to be
    done to their logits, the ranks tell each other their likeliest tokens, and else all logits. Every rank samples, and gets the
    same tokens.
    """

    def __init__(self, inner: Sampler, vocabulary: SplitVocabulary) -> None:
        self._inner = inner
        self._vocabulary = vocabulary

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs) -> SampledTokens:
        if not self._vocabulary.is_apart(logits):
            return self._inner.sample(logits, inputs)
        if not inputs.kinds.any_drawn and not inputs.rules:
            peaks, token_ids = self._vocabulary.likeliest(*self._own_peaks(logits))
            if bool(peaks.isfinite().all()):
                return SampledTokens(token_ids.numpy(force=True), None)
        return self._inner.sample(self._vocabulary.whole(logits), inputs)

    def _own_peaks(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = self._vocabulary.own
        if own == 0:
            nothing = logits.new_full((len(logits),), -torch.inf)
            return nothing, nothing.new_zeros(len(logits), dtype=torch.int64)
        return peak(logits if own == logits.shape[-1] else logits[:, :own].contiguous())
