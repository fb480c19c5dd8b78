"""Rules that change the logits of single rows before sampling, including penalties, and the state of the rules of each
request.

The rules are applied in the order grammar, allowed tokens, bias, penalties, bans, Whisper. Bans exclude bad words, and
end tokens before min_tokens. Applying bans after penalties has the same effect as applying bans before penalties,
because penalties never change a logit of minus infinity. Bans are applied late because they are undone in rows where no
other token is left. Whisper's rules are last, as in transformers, because they compare probabilities.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.models.whisper_rules import WhisperRules
from penstock_enginecore.sample.filters import peak
from penstock_enginecore.sample.whisper import WhisperRequest, WhisperRows
from penstock_enginecore.structured_output.core.reasoning import ReasoningBudget

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PenaltyEntries:
    """Logits to penalize, as parallel arrays: row, token id, repetition penalty, and the value to subtract after
    applying the repetition penalty.
    """

    rows: IntArray
    token_ids: IntArray
    repetition: FloatArray
    subtracted: FloatArray


class TokenCounts:
    """Distinct tokens of a sequence, and how often each token occurs in the output. The counts are updated token by
    token.

    Memory and time per step are proportional to the number of distinct tokens, not to the size of the vocabulary. If
    ``with_prompt`` is true, the prompt's tokens are included. Only the repetition penalty needs the prompt's tokens.
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
        """Return a copy of these counts with more output tokens."""
        later = copy(self)
        later._token_ids, later._counts, later._index = self._token_ids.copy(), self._counts.copy(), self._index.copy()
        for token_id in token_ids:
            later.append(token_id)
        return later

    def append(self, token_id: int) -> None:
        """Count one more occurrence of a token in the output."""
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
        """Ids of the distinct tokens."""
        return self._token_ids[: self._size]

    @property
    def counts(self) -> IntArray:
        """Number of times that each token in ``token_ids`` occurs in the output. The number is 0 for a token that is
        only in the prompt.
        """
        return self._counts[: self._size]


def has_penalties(params: SamplingParams) -> bool:
    """Return whether any penalty in ``params`` has an effect."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def join_penalties(by_row: Sequence[tuple[int, SamplingParams, TokenCounts]]) -> PenaltyEntries:
    """Return the penalty entries of several batch rows as joined arrays."""
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


NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Entries:
    """Positions of single logits in a batch, as parallel int64 arrays of rows and token ids."""

    rows: IntArray
    token_ids: IntArray

    @classmethod
    def join(cls, by_row: Sequence[tuple[int, IntArray]]) -> "Entries":
        """Return the positions for pairs of a row and the token ids in this row."""
        lengths = [len(ids) for _, ids in by_row]
        rows = np.repeat(np.array([row for row, _ in by_row], dtype=np.int64), lengths)
        return cls(rows, np.concatenate([ids for _, ids in by_row]))

    def index(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions as an index into a tensor ``[rows, vocab]``."""
        return torch.from_numpy(self.rows).to(device), torch.from_numpy(self.token_ids).to(device)


@dataclass(frozen=True, slots=True)
class GrammarRows:
    """Grammar masks of the rows with indices ``rows``. ``bitmask`` is int32 ``[len(rows), words]`` with one bit per
    token, the lowest bit first. A bit is set if the token is allowed.
    """

    rows: IntArray
    bitmask: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LogitRules:
    """Rules for all rows of a step. A rule is None if no row has this rule.

    Attributes:
        grammar: Grammar masks.
        allowed: Positions of the only tokens that may be chosen in the rows of these positions.
        bias: Positions, and the float32 values that are added to the logits at these positions.
        penalties: Positions of logits to penalize, with their penalties.
        banned: Positions of tokens that may be chosen only if no other token is left in the row.
        whisper: Rules of Whisper models.
    """

    grammar: GrammarRows | None = None
    allowed: Entries | None = None
    bias: tuple[Entries, npt.NDArray[np.float32]] | None = None
    penalties: PenaltyEntries | None = None
    banned: Entries | None = None
    whisper: WhisperRows | None = None

    def __bool__(self) -> bool:
        rules = (self.grammar, self.allowed, self.bias, self.penalties, self.banned, self.whisper)
        return any(rule is not None for rule in rules)

    @property
    def rows(self) -> IntArray:
        """Indices of the rows that have a rule, int64, unsorted. An index may be repeated."""
        biased = None if self.bias is None else self.bias[0]
        rules = (self.grammar, self.allowed, biased, self.penalties, self.banned, self.whisper)
        return np.concatenate([np.zeros(0, dtype=np.int64), *(rule.rows for rule in rules if rule is not None)])


Masking = Callable[[torch.Tensor, GrammarRows], None]
Upload = Callable[[Sequence[npt.NDArray[Any]]], Sequence[torch.Tensor]]
"""Function that returns vectors of the host as tensors on the device of the logits."""


def apply_rules(
    logits: torch.Tensor, rules: LogitRules, mask: Masking | None = None, upload: Upload | None = None
) -> None:
    """Apply the rules to ``logits`` float32 ``[rows, vocab]`` in place.

    The operations on ``logits`` never wait for the device. ``mask`` replaces ``mask_grammar``. ``upload`` replaces the
    separate copies of the vectors to the device.
    """
    upload = upload or partial(_upload, logits.device)
    steps: list[tuple[tuple[npt.NDArray[Any], ...], Callable[..., None]]] = []
    if rules.grammar is not None and mask is not None:
        mask(logits, rules.grammar)
    elif rules.grammar is not None:
        steps.append(_masking(logits, rules.grammar))
    if (allowed := rules.allowed) is not None:
        steps.append(((allowed.rows, allowed.token_ids, np.unique(allowed.rows)), _keep_allowed))
    if rules.bias is not None:
        biased, values = rules.bias
        steps.append(((biased.rows, biased.token_ids, values), _add_bias))
    if (counted := rules.penalties) is not None:
        steps.append(((counted.rows, counted.token_ids, counted.repetition, counted.subtracted), _penalize))
    if (banned := rules.banned) is not None:
        steps.append(((banned.rows, banned.token_ids), _ban))
    if (whisper := rules.whisper) is not None:
        steps.append(((whisper.rows, whisper.kinds, whisper.least), whisper.apply))
    moved = iter(upload([vector for vectors, _ in steps for vector in vectors]))
    for vectors, apply in steps:
        apply(logits, *islice(moved, len(vectors)))


def _upload(device: torch.device, vectors: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
    return [torch.from_numpy(vector).to(device) for vector in vectors]


def mask_grammar(logits: torch.Tensor, grammar: GrammarRows) -> None:
    """Set the logits of tokens whose bits are not set in the grammar masks to minus infinity."""
    vectors, apply = _masking(logits, grammar)
    apply(logits, *_upload(logits.device, vectors))


def _masking(logits: torch.Tensor, grammar: GrammarRows) -> tuple[tuple[npt.NDArray[Any], ...], Callable[..., None]]:
    words = np.ascontiguousarray(grammar.bitmask).view(np.uint8)
    rows = grammar.rows
    everything = len(rows) == len(logits) and bool((rows == np.arange(len(rows))).all())
    return (rows, words.reshape(-1)), partial(_mask, everything=everything)


def _mask(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor, *, everything: bool) -> None:
    # Look up the upper limits of eight logits for each byte of a mask, and take the minimum of logit and limit. On a
    # CPU, a masked fill is many times slower, because it branches.
    limits = _byte_limits(logits.device)[words.view(len(rows), -1).int()].flatten(1)[:, : logits.shape[1]]
    if everything:
        torch.minimum(logits, limits, out=logits)
    else:
        logits[rows] = torch.minimum(logits[rows], limits)


@cache
def _byte_limits(device: torch.device) -> torch.Tensor:
    """Return a table ``[256, 8]`` with one row for each value of a byte and one column for each bit, the lowest bit
    first. An entry is infinity if the bit is set, otherwise minus infinity.
    """
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits == 1, np.float32(np.inf), np.float32(-np.inf))).to(device)


def _keep_allowed(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, distinct_rows: torch.Tensor
) -> None:
    """Set the logits of all tokens except the allowed tokens to minus infinity, in the rows that have allowed tokens."""
    kept = logits[rows, token_ids]
    logits[distinct_rows] = NEVER
    logits[rows, token_ids] = kept


def _add_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor) -> None:
    logits[rows, token_ids] = logits[rows, token_ids] + bias


def _penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    repetition: torch.Tensor,
    subtracted: torch.Tensor,
) -> None:
    """Divide positive logits by the repetition penalty and multiply other logits by the penalty. Then subtract
    frequency and presence penalties.
    """
    values = logits[rows, token_ids]
    logits[rows, token_ids] = torch.where(values > 0, values / repetition, values * repetition) - subtracted


def _ban(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Set the logits of banned tokens to minus infinity, except in rows where no other token is left.

    An example of such a row is a grammar that allows only the end of the sequence while min_tokens forbids it.
    """
    before = logits[rows, token_ids]
    logits[rows, token_ids] = NEVER
    empty = peak(logits)[0] == NEVER
    logits[rows, token_ids] = torch.where(empty[rows], before, NEVER)


class BadWords:
    """Token sequences that must not be generated. The last token of a sequence is banned while the output ends with the
    sequence's other tokens.
    """

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._always = sorted({word[0] for word in words if len(word) == 1})
        # The key is the last token but one of a sequence, so that few sequences must be compared with the output.
        self._by_token: dict[int, list[tuple[tuple[int, ...], int]]] = defaultdict(list)
        for word in words:
            if len(word) > 1:
                self._by_token[word[-2]].append((word[:-1], word[-1]))

    @property
    def has_sequences(self) -> bool:
        """Whether a sequence has several tokens, so that ``banned`` depends on the output."""
        return bool(self._by_token)

    def banned(self, output: npt.NDArray[np.integer]) -> list[int]:
        """Return the tokens that must not follow the output tokens ``output``, because they would complete a bad
        word.
        """
        banned = list(self._always)
        for rest, last in self._by_token.get(int(output[-1]), ()) if len(output) else ():
            if len(rest) <= len(output) and tuple(output[-len(rest) :].tolist()) == rest:
                banned.append(last)
        return banned


class RequestRules:
    """State of the rules of one request. ``token_ids`` has the tokens of the prompt and of the output so far."""

    def __init__(
        self,
        params: SamplingParams,
        token_ids: npt.NDArray[np.integer],
        num_prompt_tokens: int,
        eos_token_ids: frozenset[int],
        reasoning_budget: ReasoningBudget | None = None,
        whisper: WhisperRequest | None = None,
    ) -> None:
        self.params = params
        self.whisper = whisper
        self._reasoning_budget = reasoning_budget
        self._allowed = np.array(params.allowed_token_ids, dtype=np.int64)
        self.bias_token_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self.bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self.counts: TokenCounts | None = None
        if has_penalties(params):
            with_prompt = params.repetition_penalty != 1.0
            self.counts = TokenCounts(token_ids.astype(np.int64), num_prompt_tokens, with_prompt=with_prompt)
        self._bad_words = BadWords(params.bad_word_token_ids)
        self._ends = sorted(set(params.stop_token_ids) | (set() if params.ignore_eos else eos_token_ids))

    @classmethod
    def create(
        cls,
        params: SamplingParams,
        token_ids: npt.NDArray[np.integer],
        num_prompt_tokens: int,
        eos_token_ids: frozenset[int],
        reasoning_budget: ReasoningBudget | None = None,
        model_rules: WhisperRules | None = None,
    ) -> Self | None:
        """Return the rules of a request, or None if the request has no rules. ``model_rules`` are those of the model."""
        listed = params.allowed_token_ids or params.logit_bias or params.bad_word_token_ids
        whisper = WhisperRequest.of(model_rules, params, token_ids[:num_prompt_tokens])
        known = reasoning_budget is not None or whisper is not None
        if listed or params.min_tokens > 0 or has_penalties(params) or known:
            return cls(params, token_ids, num_prompt_tokens, eos_token_ids, reasoning_budget, whisper)
        return None

    @property
    def reads_output(self) -> bool:
        """Whether the rules depend on the output tokens, and not only on their number."""
        timed = self.whisper is not None and self.whisper.timed
        return self.counts is not None or self._bad_words.has_sequences or self._reasoning_budget is not None or timed

    def behind(self, output: npt.NDArray[np.integer], num_drafts: int) -> Self:
        """Return the rules for the position after the output tokens ``output``. The last ``num_drafts`` of these tokens
        are draft tokens that were not passed to ``append`` yet.
        """
        if self.counts is None or not num_drafts:
            return self
        later = copy(self)
        later.counts = self.counts.with_output(output[-num_drafts:].tolist())
        return later

    def append(self, token_id: int) -> None:
        """Record an output token for penalties."""
        if self.counts is not None:
            self.counts.append(token_id)

    def allowed(self, output: npt.NDArray[np.integer]) -> IntArray:
        """Return the only tokens that may follow the output tokens ``output``, or an empty array if all tokens may
        follow. If the reasoning budget forces the end of the reasoning, only that token may follow.
        """
        forced = self._forced(output)
        return self._allowed if forced is None else np.array([forced], dtype=np.int64)

    def banned(self, output: npt.NDArray[np.integer]) -> list[int]:
        """Return the tokens that must not follow the output tokens ``output``: last tokens of bad words, and end tokens
        if the output has fewer than min_tokens tokens.

        If the reasoning budget forces the end of the reasoning, no token is banned.
        """
        if self._forced(output) is not None:
            return []
        banned = self._bad_words.banned(output)
        return banned + self._ends if len(output) < self.params.min_tokens else banned

    def _forced(self, output: npt.NDArray[np.integer]) -> int | None:
        return None if self._reasoning_budget is None else self._reasoning_budget.forced(output)


def join_rules(
    by_row: Sequence[tuple[int, RequestRules, npt.NDArray[np.integer]]], grammar: GrammarRows | None
) -> LogitRules:
    """Combine the rules and the output tokens of single rows into the rules for all rows of a step."""
    allowed = [(row, only) for row, rules, output in by_row if len(only := rules.allowed(output))]
    biased = [(row, rules) for row, rules, _ in by_row if len(rules.bias)]
    counted = [(row, rules.params, c) for row, rules, _ in by_row if (c := rules.counts) and len(c.token_ids)]
    banned = [(row, np.array(bans, np.int64)) for row, rules, output in by_row if (bans := rules.banned(output))]
    return LogitRules(
        grammar=grammar,
        allowed=Entries.join(allowed) if allowed else None,
        bias=(
            Entries.join([(row, rules.bias_token_ids) for row, rules in biased]),
            np.concatenate([rules.bias for _, rules in biased]),
        )
        if biased
        else None,
        penalties=join_penalties(counted) if counted else None,
        banned=Entries.join(banned) if banned else None,
        whisper=WhisperRows.join([(row, rules.whisper, output) for row, rules, output in by_row if rules.whisper]),
    )
