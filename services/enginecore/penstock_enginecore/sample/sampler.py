"""Sampling of tokens from logits, computation of log-probabilities, sampling from logits that are split over ranks, and
verification of draft tokens.

The order of operations is grammar, allowed tokens, bias, bad words, min_tokens, penalties, temperature, min_p, top_k,
top_p, sampling. Only operations that a batch needs are computed. For example, greedy rows without rules need only an
argmax. The token of a row never depends on other rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock_common.types.outputs import Logprobs
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.parallel.sharding import SplitVocabulary
from penstock_enginecore.sample.base import FloatArray, SampledTokens, Sampler, SamplingInputs
from penstock_enginecore.sample.filters import FilterInputs, draw_filtered, largest, peak, row_slices
from penstock_enginecore.sample.rules import Entries, GrammarRows, LogitRules, apply_rules

# Log-probabilities of the model's distribution before grammar, bias, penalties and temperature.


@dataclass(frozen=True, slots=True)
class WantedLogprobs:
    """Tokens whose log-probabilities a request wants besides the chosen token.

    Attributes:
        count: Number of likeliest tokens; -1 means all tokens of the vocabulary. Unused if ``token_ids`` is not empty.
        token_ids: The only tokens to report, instead of the likeliest tokens.
    """

    count: int
    token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, params: SamplingParams) -> "WantedLogprobs | None":
        """Return the tokens that a request wants for each output token, or None if it wants no log-probabilities."""
        return cls(params.logprobs or 0, params.logprob_token_ids) if params.has_logprobs else None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities on the host, as arrays ``[rows, 1 + k]``: first the chosen token, then the k likeliest tokens
    in descending order, or k given tokens.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor

    @classmethod
    def unpack(cls, packed: npt.NDArray[np.int32]) -> "TokenLogprobs":
        """Return the log-probabilities that ``pack_logprobs`` or ``pack_listed`` has packed."""
        token_ids, logprobs, ranks = torch.from_numpy(packed)
        return cls(token_ids.long(), logprobs.view(torch.float32), ranks)

    def add_to(self, logprobs: Logprobs, row: int, count: int) -> None:
        """Append the log-probabilities of one row to ``logprobs`` as one more position, with the first ``count`` tokens
        after the chosen token.
        """
        end = 1 + count
        logprobs.add(
            self.token_ids[row, :end].tolist(), self.logprobs[row, :end].tolist(), self.ranks[row, :end].tolist()
        )


def token_logprobs(logits: torch.Tensor, chosen: torch.Tensor, count: int) -> TokenLogprobs:
    """Return log-probabilities of the tokens ``chosen`` int64 ``[rows]`` and of the ``count`` likeliest tokens.

    ``logits`` is ``[rows, vocab]`` of any float dtype. The rank of a token is 1 plus the number of tokens that are
    strictly likelier.
    """
    return TokenLogprobs.unpack(pack_logprobs(logits, chosen, count).numpy(force=True))


PackLogprobs = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Function with the arguments and the result of ``pack_logprobs``."""


def pack_logprobs(logits: torch.Tensor, chosen: torch.Tensor, count: int) -> torch.Tensor:
    """Return the log-probabilities that ``token_logprobs`` returns as one tensor on the device, int32 ``[3, rows, 1 +
    count]``: token ids, the bits of the log-probabilities, and ranks. The call does not wait for the device.
    """
    return _pack([_part(logits[part], chosen[part, None], count) for part in row_slices(logits)])


def pack_listed(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of the tokens ``token_ids`` int64 ``[rows, k]`` of each row, packed as
    ``pack_logprobs`` packs the likeliest tokens, int32 ``[3, rows, k]``. The call does not wait for the device.
    """
    return _pack([_part(logits[part], token_ids[part], 0) for part in row_slices(logits)])


def _pack(parts: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    token_ids, logprobs, ranks = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return torch.stack([token_ids.int(), logprobs.view(torch.int32), ranks.int()])


def _part(logits: torch.Tensor, named: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids, log-probabilities and ranks of the tokens ``named`` ``[rows, k]`` and of the ``count``
    likeliest tokens, ``[rows, k + count]`` each.
    """
    logits = logits.float()
    token_ids, values = named, logits.gather(1, named)
    # One comparison with all logits per token, because a comparison with all tokens needs k copies of the logits.
    ranks = torch.stack([(logits > value[:, None]).sum(dim=-1) for value in values.unbind(1)], dim=1) + 1
    if count:
        likeliest, columns = largest(logits, count)
        token_ids = torch.cat([token_ids, columns], dim=1)
        values = torch.cat([values, likeliest], dim=1)
        ranks = torch.cat([ranks, _ranks(likeliest)], dim=1)
    return token_ids, values - logits.logsumexp(dim=-1, keepdim=True), ranks


def _ranks(descending: torch.Tensor) -> torch.Tensor:
    """Return the ranks ``[rows, n]`` of values that are in descending order. Equal values get the rank of the first of
    these values.
    """
    ranks = torch.arange(descending.shape[1], device=descending.device).expand_as(descending).clone()
    ranks[:, 1:].masked_fill_(descending[:, 1:] == descending[:, :-1], 0)
    return ranks.cummax(dim=1).values + 1


class SamplingKernels(Protocol):
    """Interface of kernels that replace torch's operations for logits that the kernels support."""

    def takes(self, logits: torch.Tensor) -> bool:
        """Return whether the kernels support ``logits``."""

    def mask(self, logits: torch.Tensor, grammar: GrammarRows) -> None:
        """Set the logits of tokens whose bits are not set to minus infinity, in place, as ``rules.mask_grammar``
        does.
        """

    def sample(
        self, logits: torch.Tensor, temperature: npt.NDArray[np.float32], uniforms: FloatArray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest value of each row, ``[rows]``, and a column of each row, int64 ``[rows]``.

        The column is the first column with the largest value. If ``temperature`` is not 0 and the largest value is
        finite, the column is sampled from the complete row with ``uniforms`` instead.
        """


class TorchSampler:
    """``Sampler`` that uses torch's operations, for any device.

    For logits that ``kernels`` supports, the kernels find the largest logits and sample rows without filters.
    """

    def __init__(self, kernels: SamplingKernels | None = None) -> None:
        self._kernels = kernels

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs) -> SampledTokens:
        """Apply the rules, find the largest logit of every row, which determines the token of greedy rows, and sample
        the tokens of other rows.
        """
        kernels = self._kernels
        if inputs.rules:
            logits = logits.float()
            apply_rules(logits, inputs.rules, kernels.mask if kernels is not None and kernels.takes(logits) else None)
        kinds = inputs.kinds
        if kernels is not None and kernels.takes(logits):
            peaks, token_ids = kernels.sample(logits, kinds.plain_temperature, inputs.uniforms)
            any_left, left = kinds.any_filtered, kinds.filtered
        else:
            peaks, token_ids = peak(logits)
            any_left, left = kinds.any_drawn, kinds.drawn
        finite = np.isfinite(peaks.float().cpu().numpy())
        # If no token is allowed, or the largest logit is NaN, the row keeps the first column with the largest logit as
        # its token.
        if any_left and len(drawn := np.flatnonzero(left & finite)):
            rows = torch.from_numpy(drawn).to(logits.device)
            everything = len(drawn) == len(logits)
            chosen = draw_filtered(_filter_inputs(logits if everything else logits[rows], peaks[rows], inputs, drawn))
            token_ids[rows] = chosen
        num_nans = None if finite.all() else _num_nans(logits, peaks, inputs.rules)
        return SampledTokens(token_ids.cpu().numpy(), num_nans)


def _num_nans(logits: torch.Tensor, peaks: torch.Tensor, rules: LogitRules) -> npt.NDArray[np.int64] | None:
    """Return ``SampledTokens.num_nans`` for a batch in which the largest logit of some rows is not finite."""
    wrong = logits.isnan() | (logits == float("inf"))
    if rules.penalties is not None:  # A repetition penalty near 0 turns finite logits into infinity.
        wrong[Entries(rules.penalties.rows, rules.penalties.token_ids).index(logits.device)] = False
    counts: npt.NDArray[np.int64] = wrong.sum(dim=-1).cpu().numpy()
    nothing = (peaks == float("-inf")).cpu().numpy()
    nothing[rules.rows] = False  # Rules may leave no token that can be chosen.
    counts[nothing] = logits.shape[1]
    return counts if counts.any() else None


def _filter_inputs(
    logits: torch.Tensor, peaks: torch.Tensor, inputs: SamplingInputs, rows: npt.NDArray[np.int64]
) -> FilterInputs:
    """Return the inputs of the filters for the rows ``rows``. ``logits`` and ``peaks`` contain only these rows."""
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


# Sampling from logits whose columns are split over ranks.


class SplitSampler:
    """``Sampler`` for complete logits, or for logits of which each tensor-parallel rank has only some columns.

    If all rows are greedy and without rules, ranks exchange only their likeliest tokens. Otherwise ranks exchange all
    logits. Every rank samples and gets the same tokens.
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


# Verification of draft tokens. A request's draft tokens are accepted up to the first one that differs from the sampled
# token.
#
# For each row, the sampled token is the same as without drafts, because it depends only on the row's logits, rules and
# random number. Therefore the output depends neither on the draft tokens nor on their number (drafter-invariant
# speculative decoding; Daliri, Musco and Suresh, 2024).

IntArray = npt.NDArray[np.int64]


def final_runs(token_ids: IntArray, num_rows: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the next tokens of each request: its accepted draft tokens, and one more token.

    Args:
        token_ids: int64 ``[rows]``, sampled tokens. Request i has one row more than draft tokens. Row j of the request
            has the token after ``drafts[i][:j]``.
        num_rows: Number of rows of each request that may be used, at least 1.
        drafts: Draft tokens of each request.
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
