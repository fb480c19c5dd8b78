"""Rules of Whisper models for output tokens: suppressed tokens and the order of timestamps.

The rules are those of transformers' ``SuppressTokensAtBeginLogitsProcessor``, ``SuppressTokensLogitsProcessor`` and
``WhisperTimeStampLogitsProcessor``, in the order of ``WhisperGenerationMixin``. Timestamps are the tokens after
``<|notimestamps|>``, one for each 0.02 s. They frame each segment of text, in pairs between segments, and never
decrease.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.models.whisper_rules import WhisperRules

IntArray = npt.NDArray[np.int64]


class _Kind(IntEnum):
    """The tokens that are always excluded at an output position."""

    LATER = 0
    """Later output token of a request without timestamps: the suppressed tokens."""
    FIRST = 1
    """First output token of a request without timestamps: also the tokens suppressed at the beginning."""
    TIMED = 2
    """Output token after text, with timestamps: the suppressed tokens and ``<|notimestamps|>``."""
    TIMED_FIRST = 3
    """First output token with timestamps: all tokens but the first timestamps."""
    AFTER_ONE = 4
    """Output token after text and one timestamp: text is excluded too. A timestamp or the end must follow."""
    AFTER_PAIR = 5
    """Output token after the first timestamp, or after two timestamps: timestamps are excluded too."""


@dataclass(frozen=True, slots=True)
class WhisperRequest:
    """Whisper's rules for one request. ``timed`` is true if its output has timestamps."""

    rules: WhisperRules
    timed: bool

    @classmethod
    def of(
        cls, rules: WhisperRules | None, params: SamplingParams, prompt: npt.NDArray[np.integer]
    ) -> "WhisperRequest | None":
        """Return the rules for a request, or None if the model has none.

        ``allowed_token_ids`` and ``structured_output`` replace the rules of the model: together they might leave no
        token.
        """
        if rules is None or params.allowed_token_ids or params.structured_output is not None:
            return None
        return cls(rules, rules.times(prompt))

    def at(self, output: npt.NDArray[np.integer]) -> tuple[int, int]:
        """Return the kind of the position after the output tokens ``output`` int ``[tokens]``, and the smallest
        timestamp that may follow.
        """
        begin = self.rules.first_timestamp
        if not self.timed:
            return (_Kind.LATER if len(output) else _Kind.FIRST), begin
        if not len(output):
            return _Kind.TIMED_FIRST, begin
        is_timestamp = output >= begin
        last = bool(is_timestamp[-1])
        pair = last and (len(output) < 2 or bool(is_timestamp[-2]))
        kind = _Kind.AFTER_PAIR if pair else _Kind.AFTER_ONE if last else _Kind.TIMED
        if not is_timestamp.any():
            return kind, begin
        newest = int(output[np.flatnonzero(is_timestamp)[-1]])
        # Only the second timestamp of a pair may repeat the first one.
        return kind, newest if kind is _Kind.AFTER_ONE else newest + 1


@dataclass(frozen=True, slots=True)
class WhisperRows:
    """Whisper's rules for the rows of a step with indices ``rows``, as parallel int64 arrays. ``kinds`` and ``least``
    are the results of ``WhisperRequest.at``.
    """

    rules: WhisperRules
    rows: IntArray
    kinds: IntArray
    least: IntArray

    @classmethod
    def join(cls, by_row: Sequence[tuple[int, WhisperRequest, npt.NDArray[np.integer]]]) -> "WhisperRows | None":
        """Return the rules for triples of a row, its request's rules, and its output so far; None if there are none."""
        if not by_row:
            return None
        kinds, least = zip(*(request.at(output) for _, request, output in by_row), strict=True)
        rows = np.array([row for row, _, _ in by_row], dtype=np.int64)
        return cls(by_row[0][1].rules, rows, np.array(kinds, dtype=np.int64), np.array(least, dtype=np.int64))

    @property
    def any_timed(self) -> bool:
        """Whether the output of a row has timestamps."""
        return bool((self.kinds >= _Kind.TIMED).any())

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, kinds: torch.Tensor, least: torch.Tensor) -> None:
        """Exclude tokens from ``logits`` float32 ``[rows, vocab]`` in place, without waiting for the device. The other
        arguments are this object's arrays on the device.
        """
        everything = len(self.rows) == len(logits) and bool((self.rows == np.arange(len(logits))).all())
        block = logits if everything else logits[rows]
        block.masked_fill_(_excluded(self.rules, logits.shape[1], logits.device)[kinds], -torch.inf)
        if self.any_timed:
            begin = self.rules.first_timestamp
            text, times = block[:, :begin], block[:, begin:]
            early = torch.arange(begin, logits.shape[1], device=logits.device) < least[:, None]
            times.masked_fill_(early, -torch.inf)
            # A timestamp must follow if all timestamps together are likelier than each text token.
            logprobs = block.log_softmax(dim=-1)
            likelier = logprobs[:, begin:].logsumexp(dim=-1) > logprobs[:, :begin].amax(dim=-1)
            text.masked_fill_((likelier & (kinds >= _Kind.TIMED))[:, None], -torch.inf)
        if not everything:
            logits[rows] = block


@cache
def _excluded(rules: WhisperRules, vocab: int, device: torch.device) -> torch.Tensor:
    """Return the tokens that are always excluded at each kind of position, bool ``[kinds, vocab]`` on ``device``."""
    table = np.zeros((len(_Kind), vocab), dtype=np.bool_)
    table[:, list(rules.suppressed)] = True
    for kind in (_Kind.FIRST, _Kind.TIMED_FIRST):
        table[kind, list(rules.suppressed_first)] = True
    if rules.no_timestamps is not None:
        begin = rules.first_timestamp
        table[_Kind.TIMED :, rules.no_timestamps] = True
        table[_Kind.TIMED_FIRST, :begin] = True
        if rules.max_first_timestamp is not None:
            table[_Kind.TIMED_FIRST, begin + rules.max_first_timestamp + 1 :] = True
        table[_Kind.AFTER_ONE, : rules.end] = True
        table[_Kind.AFTER_PAIR, begin:] = True
    return torch.from_numpy(table).to(device)
