"""What penalties need to know of a request: its distinct tokens and how often each was put out."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock_common.types.sampling import SamplingParams

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PenaltyEntries:
    """The logits to penalize, as parallel arrays: row, token id, what to divide or multiply by, and what to subtract then."""

    rows: IntArray
    token_ids: IntArray
    repetition: FloatArray
    subtracted: FloatArray


class TokenCounts:
    """The distinct tokens of a sequence and their counts in its output, kept up to date token by token.

    Takes memory in proportion to the distinct tokens, not to the vocabulary, and a step costs as much. ``with_prompt``
    counts the prompt's tokens in, which only the repetition penalty looks at.
    """

    def __init__(self, token_ids: IntArray, num_prompt_tokens: int, *, with_prompt: bool) -> None:
        start = 0 if with_prompt else num_prompt_tokens
        distinct, inverse = np.unique(token_ids[start:], return_inverse=True)
        self._size = len(distinct)
        self._token_ids = distinct.astype(np.int64)
        output = inverse[num_prompt_tokens - start :]
        self._counts = np.bincount(output, minlength=self._size).astype(np.int64)
        self._index = dict(zip(distinct.tolist(), range(self._size), strict=True))

    def with_output(self, token_ids: Sequence[int]) -> "TokenCounts":
        """These counts and those of more output, apart from these."""
        later = copy(self)
        later._token_ids, later._counts, later._index = self._token_ids.copy(), self._counts.copy(), self._index.copy()
        for token_id in token_ids:
            later.append(token_id)
        return later

    def append(self, token_id: int) -> None:
        """Count an output token."""
        index = self._index.get(token_id)
        if index is None:
            index = self._index[token_id] = self._size
            self._size += 1
            if index >= len(self._token_ids):
                self._token_ids = np.resize(self._token_ids, max(16, 2 * self._size))
                self._counts = np.resize(self._counts, len(self._token_ids))
            self._token_ids[index] = token_id
            self._counts[index] = 0
        self._counts[index] += 1

    @property
    def token_ids(self) -> IntArray:
        """The distinct tokens."""
        return self._token_ids[: self._size]

    @property
    def counts(self) -> IntArray:
        """How often each is in the output; 0 for one that is only in the prompt."""
        return self._counts[: self._size]


def has_penalties(params: SamplingParams) -> bool:
    """Whether any penalty does anything."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def join_penalties(by_row: Sequence[tuple[int, SamplingParams, TokenCounts]]) -> PenaltyEntries:
    """The entries of several rows."""
    lengths = [len(counts.token_ids) for _, _, counts in by_row]

    def repeated(values: Sequence[float], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        return np.repeat(np.array(values, dtype=dtype), lengths)

    counts = np.concatenate([counts.counts for _, _, counts in by_row])
    frequency = repeated([params.frequency_penalty for _, params, _ in by_row], np.float64)
    presence = repeated([params.presence_penalty for _, params, _ in by_row], np.float64)
    return PenaltyEntries(
        rows=repeated([row for row, _, _ in by_row], np.int64).astype(np.int64),
        token_ids=np.concatenate([counts.token_ids for _, _, counts in by_row]),
        repetition=repeated([params.repetition_penalty for _, params, _ in by_row], np.float32).astype(np.float32),
        subtracted=(frequency * counts + presence * (counts > 0)).astype(np.float32),
    )
