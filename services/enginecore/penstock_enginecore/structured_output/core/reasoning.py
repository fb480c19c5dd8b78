"""Reasoning in a model's output: constraints that apply only after the reasoning, and the limit on the number of
reasoning tokens.
"""

import enum
from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt

from penstock_common.errors import RequestFailed
from penstock_common.types.request import EngineCoreRequest, ReasoningTokens
from penstock_enginecore.structured_output.core.base import BITS, Grammar, Mask, allows, bitmask_words

_NEAR_END = 4
"""Number of tokens at the end of the prompt in which a reasoning tag begins or ends the reasoning of the output. Chat
templates write only whitespace after such a tag. Tags before these tokens belong to earlier turns of the conversation.
"""


class At(enum.Enum):
    """Position of the next output token relative to the reasoning in the output."""

    START = enum.auto()
    """The output is empty. Its first token decides whether the output begins with reasoning."""
    REASONING = enum.auto()
    ENDED = enum.auto()
    """The reasoning has ended or is absent. The constraint applies to all following tokens."""


class ReasoningGate:
    """Decides for each output token in order whether it belongs to the reasoning or to the constrained part of the
    output.

    Args:
        tokens: Ids of the tokens that begin and end the reasoning (the tags).
        prompt: Tokens of the prompt.
        ended: True if the prompt ends the reasoning, False if the prompt begins the reasoning, None to decide by tags
            in the last tokens of the prompt.
    """

    def __init__(self, tokens: ReasoningTokens, prompt: Sequence[int], ended: bool | None) -> None:
        self.tokens = tokens
        self.at = _at_end_of(prompt, tokens) if ended is None else At.ENDED if ended else At.REASONING

    def passes(self, token_id: int) -> bool:
        """Process the next output token. Return whether the constraint applies to this token."""
        if self.at is At.START:
            begins = token_id == self.tokens.begin_token_id
            self.at = At.REASONING if begins else At.ENDED
            return not begins
        if self.at is At.REASONING:
            if token_id == self.tokens.end_token_id:
                self.at = At.ENDED
            return False
        return True

    def passed(self, token_ids: Sequence[int]) -> list[int]:
        """Process output tokens in order. Return the tokens to which the constraint applies."""
        return [token_id for token_id in token_ids if self.passes(token_id)]


class GatedGrammar:
    """A ``Grammar`` that constrains only the output after the reasoning. During the reasoning, all tokens that the mask
    ``unconstrained`` allows are allowed.

    ``grammar`` must already have the mask for its next token, after the prior tokens to which ``gate`` applies the
    constraint.
    """

    def __init__(self, grammar: Grammar, gate: ReasoningGate, unconstrained: Mask) -> None:
        self._grammar = grammar
        self._gate = gate
        self._unconstrained = unconstrained
        self._drafts: Sequence[Mask] = ()

    @property
    def _reasoning(self) -> bool:
        return self._gate.at is At.REASONING

    @property
    def ready(self) -> bool:
        """Whether ``mask`` is the mask for the request's next token. Always True during the reasoning."""
        return self._reasoning or self._grammar.ready

    @property
    def mask(self) -> Mask:
        """Mask of the allowed next tokens, ``[ceil(vocab / 32)]``. At the start of the output, the token that begins
        reasoning is also allowed.
        """
        if self._reasoning:
            return self._unconstrained
        if self._gate.at is At.ENDED:
            return self._grammar.mask
        mask, begin = self._grammar.mask.copy(), self._gate.tokens.begin_token_id
        mask[begin // BITS] |= _bit(begin)
        return mask

    @property
    def failure(self) -> RequestFailed | None:
        """The reason why no more masks of the grammar will arrive, or None. If a reason is set, the request ends, even
        during its reasoning.
        """
        return self._grammar.failure

    @property
    def terminated(self) -> bool:
        """Whether the constraint is fulfilled and an end-of-sequence token was accepted."""
        return self._grammar.terminated

    def accept(self, token_id: int) -> bool:
        """Accept an output token. Only tokens after the reasoning are passed to the grammar. Return False if the token
        is not allowed.
        """
        if self._reasoning and not allows(self._unconstrained, token_id):
            return False
        return not self._gate.passes(token_id) or self._grammar.accept(token_id)

    @property
    def forced(self) -> Sequence[int]:
        """Tokens of the text that the grammar requires next. Empty during the reasoning."""
        return self._grammar.forced if self._gate.at is At.ENDED else ()

    def draft(self, token_ids: Sequence[int]) -> None:
        """Start to compute the masks after draft tokens. During the reasoning, the masks before the token that ends the
        reasoning allow all tokens that reasoning may contain. There are no masks for later draft tokens.
        """
        self._drafts = ()
        if self._gate.at is At.ENDED:
            self._grammar.draft(token_ids)
        elif self._reasoning:
            end = self._gate.tokens.end_token_id
            length = token_ids.index(end) if end in token_ids else len(token_ids)
            self._drafts = [self._unconstrained] * length

    @property
    def drafted(self) -> bool:
        """Whether the masks after the draft tokens are complete. Always True before the end of the reasoning."""
        return self._gate.at is not At.ENDED or self._grammar.drafted

    @property
    def draft_masks(self) -> Sequence[Mask]:
        """Masks after the first draft token, after the first two draft tokens, and so on."""
        return self._grammar.draft_masks if self._gate.at is At.ENDED else self._drafts

    @property
    def prompt(self) -> bool:
        """Whether a step may wait for the request's mask. Always True during the reasoning."""
        return self._reasoning or self._grammar.prompt

    def wanted(self) -> bool:
        """Return whether a step may include the request. The result is always True during the reasoning."""
        return self._reasoning or self._grammar.wanted()

    def missed(self) -> bool:
        """Record that a step continued without the request's mask. Return True if the mask is available now. The result
        is always True during the reasoning.
        """
        return self._reasoning or self._grammar.missed()

    def close(self) -> None:
        """Free the resources of the grammar."""
        self._grammar.close()


def all_but(token_ids: frozenset[int], vocab_size: int) -> Mask:
    """Return a mask that allows all tokens except ``token_ids``."""
    bits = np.zeros(bitmask_words(vocab_size) * BITS, np.uint8)
    bits[:vocab_size] = 1
    bits[[token_id for token_id in token_ids if 0 <= token_id < vocab_size]] = 0
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def _bit(token_id: int) -> np.int32:
    return np.uint32(1 << (token_id % BITS)).view(np.int32)


def _at_end_of(prompt: Sequence[int], tokens: ReasoningTokens) -> At:
    for token_id in reversed(prompt[-_NEAR_END:]):
        if token_id == tokens.end_token_id:
            return At.ENDED
        if token_id == tokens.begin_token_id:
            return At.REASONING
    return At.START


_FIRST = 4
"""Number of tokens at the start of the output among which the token that begins the reasoning must be. Models write at
most whitespace before this token.
"""


class ReasoningBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Decides when a request's reasoning must end. The decision depends only on the output tokens, so it is also
    correct for draft tokens and resumed requests.

    Args:
        limit: Maximum number of reasoning tokens, without the tokens that begin and end the reasoning.
        begin_token_id: Token that begins the reasoning.
        end_token_id: Token that ends the reasoning.
        begun: Whether the reasoning begins in the prompt.
    """

    limit: int
    begin_token_id: int
    end_token_id: int
    begun: bool

    @classmethod
    def of(cls, request: EngineCoreRequest) -> Self | None:
        """Return the request's budget of reasoning tokens, or None if the request has no budget or the reasoning ends
        in the prompt.
        """
        limit, tokens = request.sampling_params.thinking_token_budget, request.reasoning_parser_kwargs
        if limit is None or tokens is None:
            return None
        at = ReasoningGate(tokens, request.prompt_token_ids, request.reasoning_ended).at
        if at is At.ENDED:
            return None
        return cls(
            limit=limit,
            begin_token_id=tokens.begin_token_id,
            end_token_id=tokens.end_token_id,
            begun=at is At.REASONING,
        )

    def forced(self, output: npt.NDArray[np.integer] | Sequence[int]) -> int | None:
        """Return the token that must follow the output tokens ``output``, or None if the budget does not force a
        token.
        """
        # If the reasoning began in the prompt, the output may repeat the token that begins reasoning, but only as its
        # first token.
        first = list(output[: 1 if self.begun else _FIRST])
        if self.begin_token_id in first:
            start = first.index(self.begin_token_id) + 1
        elif self.begun:
            start = 0
        else:
            return None
        if len(output) - start != self.limit or self.end_token_id in output[start:]:
            return None
        return self.end_token_id
