"""The logit rules of one request, from its sampling parameters and the tokens it has got so far."""

from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from typing import Self

import numpy as np
import numpy.typing as npt

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.sample.penalties import TokenCounts, has_penalties, join_penalties
from penstock_enginecore.sample.rules import Entries, GrammarRows, LogitRules
from penstock_enginecore.structured_output.core.reasoning import ReasoningBudget

IntArray = npt.NDArray[np.int64]


class BadWords:
    """Token sequences that must not come out: the last token of one is banned while the rest of it ends the output."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._always = sorted({word[0] for word in words if len(word) == 1})
        # By the last token of the rest, so that few are compared.
        self._by_token: dict[int, list[tuple[tuple[int, ...], int]]] = defaultdict(list)
        for word in words:
            if len(word) > 1:
                self._by_token[word[-2]].append((word[:-1], word[-1]))

    def banned(self, output: npt.NDArray[np.integer]) -> list[int]:
        """The tokens that must not follow ``output`` ``[tokens]``."""
        banned = list(self._always)
        for rest, last in self._by_token.get(int(output[-1]), ()) if len(output) else ():
            if len(rest) <= len(output) and tuple(output[-len(rest) :].tolist()) == rest:
                banned.append(last)
        return banned


class RequestRules:
    """State of a request's rules. ``token_ids`` are prompt and output so far."""

    def __init__(
        self,
        params: SamplingParams,
        token_ids: npt.NDArray[np.integer],
        num_prompt_tokens: int,
        eos_token_ids: frozenset[int],
        reasoning_budget: ReasoningBudget | None = None,
    ) -> None:
        self.params = params
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
    ) -> Self | None:
        """The rules of a request, or None when it has none."""
        listed = params.allowed_token_ids or params.logit_bias or params.bad_word_token_ids
        if listed or params.min_tokens > 0 or has_penalties(params) or reasoning_budget is not None:
            return cls(params, token_ids, num_prompt_tokens, eos_token_ids, reasoning_budget)
        return None

    def behind(self, output: npt.NDArray[np.integer], num_drafts: int) -> Self:
        """The same rules for the position behind ``output`` ``[tokens]``, of which the last ``num_drafts`` are not known here."""
        if self.counts is None or not num_drafts:
            return self
        later = copy(self)
        later.counts = self.counts.with_output(output[-num_drafts:].tolist())
        return later

    def append(self, token_id: int) -> None:
        """Take note of an output token."""
        if self.counts is not None:
            self.counts.append(token_id)

    def allowed(self, output: npt.NDArray[np.integer]) -> IntArray:
        """The only tokens that may follow ``output``, none if all may. A token that ends the reasoning goes before the others."""
        forced = self._forced(output)
        return self._allowed if forced is None else np.array([forced], dtype=np.int64)

    def banned(self, output: npt.NDArray[np.integer]) -> list[int]:
        """The tokens that must not follow ``output`` ``[tokens]``: ends of bad words, and of a request below min_tokens.
        None where the reasoning must end.
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
    """The rules of a step, from those of its rows, with the output tokens of each."""
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
    )
