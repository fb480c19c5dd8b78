"""From logits to tokens: sampling, log-probabilities, logits split over ranks, and the verification of drafted tokens.

Order: grammar, allowed tokens, bias, bad words, min_tokens, penalties, temperature, min_p, top_k, top_p, draw. Only what a
batch needs is computed: rows that are greedy and without rules cost an argmax. A row's token never depends on the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock_common.types.outputs import Logprobs
from penstock_enginecore.parallel.sharding import SplitVocabulary
from penstock_enginecore.sample.base import FloatArray, SampledTokens, Sampler, SamplingInputs
from penstock_enginecore.sample.filters import FilterInputs, draw_filtered, largest, peak, row_slices
from penstock_enginecore.sample.rules import Entries, GrammarRows, LogitRules, apply_rules, lift_bans

# Log-probabilities of the raw distribution: before grammar, bias, penalties and temperature.


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """On the host, per row: the chosen token's, then those of the likeliest tokens, descending; all ``[rows, 1 + k]``."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor

    def add_to(self, logprobs: Logprobs, row: int, count: int) -> None:
        """Append a row to ``logprobs`` as a position with its ``count`` likeliest tokens."""
        end = 1 + count
        logprobs.add(
            self.token_ids[row, :end].tolist(), self.logprobs[row, :end].tolist(), self.ranks[row, :end].tolist()
        )


def token_logprobs(logits: torch.Tensor, chosen: torch.Tensor, count: int) -> TokenLogprobs:
    """``logits`` ``[rows, vocab]`` any float dtype, ``chosen`` int64 ``[rows]``, ``count`` at most the vocabulary's size.

    A rank is 1 plus the number of tokens that are strictly likelier.
    """
    parts = [_part(logits[part], chosen[part, None], count) for part in row_slices(logits)]
    return TokenLogprobs(*(torch.cat(columns).cpu() for columns in zip(*parts, strict=True)))


def _part(logits: torch.Tensor, chosen: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = logits.float()
    chosen_logits = logits.gather(1, chosen)
    rank = (logits > chosen_logits).sum(dim=-1, keepdim=True) + 1
    token_ids, values, ranks = chosen, chosen_logits, rank
    if count:
        likeliest, columns = largest(logits, count)
        token_ids = torch.cat([token_ids, columns], dim=1)
        values = torch.cat([values, likeliest], dim=1)
        ranks = torch.cat([ranks, _ranks(likeliest)], dim=1)
    return token_ids, values - logits.logsumexp(dim=-1, keepdim=True), ranks


def _ranks(descending: torch.Tensor) -> torch.Tensor:
    """Ranks ``[rows, n]`` of values in descending order: equal ones share the first one's."""
    ranks = torch.arange(descending.shape[1], device=descending.device).expand_as(descending).clone()
    ranks[:, 1:].masked_fill_(descending[:, 1:] == descending[:, :-1], 0)
    return ranks.cummax(dim=1).values + 1


class SamplingKernels(Protocol):
    """What kernels may do in place of torch, for logits that they take."""

    def takes(self, logits: torch.Tensor) -> bool:
        """Whether they read logits like these."""

    def mask(self, logits: torch.Tensor, grammar: GrammarRows) -> None:
        """Leave only the tokens whose bits are set, in place, as ``rules.mask_grammar`` does."""

    def sample(
        self, logits: torch.Tensor, temperature: npt.NDArray[np.float32], uniforms: FloatArray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Largest value ``[rows]`` and a column, int64 ``[rows]``: the first that has it or, where ``temperature`` is not 0
        and the value finite, the one that ``uniforms`` draws from the whole row.
        """


class TorchSampler:
    """A ``Sampler`` of torch's operations, for any device. ``kernels``: those that find peaks and draw from rows without filters,
    for the logits that they take.
    """

    def __init__(self, kernels: SamplingKernels | None = None) -> None:
        self._kernels = kernels

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs) -> SampledTokens:
        """Rules first; then the peak of every row, which is the token of a greedy one; then draws for those that are left."""
        kernels = self._kernels
        if inputs.rules:
            logits = logits.float()
            before = apply_rules(
                logits, inputs.rules, kernels.mask if kernels is not None and kernels.takes(logits) else None
            )
            if before is not None and bool((empty := peak(logits)[0] == float("-inf")).any()):
                lift_bans(logits, inputs.rules, before, empty)
        kinds = inputs.kinds
        if kernels is not None and kernels.takes(logits):
            peaks, token_ids = kernels.sample(logits, kinds.plain_temperature, inputs.uniforms)
            any_left, left = kinds.any_filtered, kinds.filtered
        else:
            peaks, token_ids = peak(logits)
            any_left, left = kinds.any_drawn, kinds.drawn
        finite = np.isfinite(peaks.float().cpu().numpy())
        # Where every token is out, or the peak is no number, there is nothing to draw from: the first peak it is.
        if any_left and len(drawn := np.flatnonzero(left & finite)):
            rows = torch.from_numpy(drawn).to(logits.device)
            everything = len(drawn) == len(logits)
            chosen = draw_filtered(_filter_inputs(logits if everything else logits[rows], peaks[rows], inputs, drawn))
            token_ids[rows] = chosen
        num_nans = None if finite.all() else _num_nans(logits, peaks, inputs.rules)
        return SampledTokens(token_ids.cpu().numpy(), num_nans)


def _num_nans(logits: torch.Tensor, peaks: torch.Tensor, rules: LogitRules) -> npt.NDArray[np.int64] | None:
    """Return ``SampledTokens.num_nans`` of rows of which some have no finite peak."""
    wrong = logits.isnan() | (logits == float("inf"))
    if rules.penalties is not None:  # a repetition penalty near 0 makes infinity of finite logits
        wrong[Entries(rules.penalties.rows, rules.penalties.token_ids).index(logits.device)] = False
    counts: npt.NDArray[np.int64] = wrong.sum(dim=-1).cpu().numpy()
    nothing = (peaks == float("-inf")).cpu().numpy()
    nothing[rules.rows] = False  # rules may leave no token
    counts[nothing] = logits.shape[1]
    return counts if counts.any() else None


def _filter_inputs(
    logits: torch.Tensor, peaks: torch.Tensor, inputs: SamplingInputs, rows: npt.NDArray[np.int64]
) -> FilterInputs:
    """``logits`` and ``peaks`` are those of ``rows`` already."""
    vocab, settings = logits.shape[1], inputs.settings
    top_k = np.where(settings.top_k > 0, np.minimum(settings.top_k, vocab), vocab)

    def column(values: npt.NDArray[np.generic], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(values[rows]).to(device=logits.device, dtype=dtype)[:, None]

    return FilterInputs(
        logits=logits,
        peaks=peaks.float()[:, None],
        temperature=column(settings.clipped_temperature, torch.float32),
        max_distance=column(settings.max_distance, torch.float32),
        top_k=column(top_k, torch.int64),
        top_p=column(settings.top_p, torch.float64),
        uniforms=column(inputs.uniforms, torch.float64),
    )


# Sampling from logits of which every rank has some columns.


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


# Which drafted tokens hold: those that are what their rows sampled, up to the first that is not.
#
# A row samples what it would sample without drafts, by its own logits, rules and random number, so that what comes out depends
# neither on the drafts nor on their number (drafter-invariant speculative decoding; Daliri, Musco and Suresh, 2024).

IntArray = npt.NDArray[np.int64]


def final_runs(token_ids: IntArray, num_rows: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The next tokens of each request among those that were sampled: its drafts that hold, and one more.

    ``token_ids`` int64 ``[rows]``: the rows of a request one behind the other, the first behind its final tokens and row j behind
    ``drafts[i][:j]``; each request has one more than drafts. ``num_rows``: how many of them can be reached, 1 at least.
    """
    runs, start = [], 0
    for rows, drafted in zip(num_rows, drafts, strict=True):
        sampled = token_ids[start : start + rows].tolist()
        count = 1
        while count < rows and sampled[count - 1] == drafted[count - 1]:
            count += 1
        runs.append(sampled[:count])
        start += len(drafted) + 1
    return runs
