"""Reasoning of a model: constraints that apply after the reasoning, and the limit on reasoning tokens."""

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
"""Number of tokens at the end of the prompt in which a reasoning tag belongs to the output. Chat templates write only
whitespace after such a tag. Tags before these tokens belong to earlier turns.
"""


class At(enum.Enum):
    """Position of an output relative to its reasoning."""

    START = enum.auto()
    """The first token decides whether the output begins with reasoning."""
    REASONING = enum.auto()
    ENDED = enum.auto()
    """The constraint applies to the following tokens."""


class ReasoningGate:
    """Separates the reasoning of an output from its constrained part, token by token.

    Args:
        tokens: The tags of the reasoning.
        prompt: Tokens of the prompt.
        ended: True if the prompt ends the reasoning, False if the prompt begins the reasoning, None to decide by the
            last tokens of the prompt.
    """

    def __init__(self, tokens: ReasoningTokens, prompt: Sequence[int], ended: bool | None) -> None:
        self.tokens = tokens
        self.at = _at_end_of(prompt, tokens) if ended is None else At.ENDED if ended else At.REASONING

    def passes(self, token_id: int) -> bool:
        """Process the next output token. Returns whether the constraint applies to this token."""
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
        """Process output tokens. Returns the tokens to which the constraint applies."""
        return [token_id for token_id in token_ids if self.passes(token_id)]


class GatedGrammar:
    """A ``Grammar`` that applies after the reasoning. During the reasoning, any token of ``unconstrained`` is allowed.

    ``grammar`` must have its first mask, or the mask after the tokens that ``gate`` has passed to it.
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
        """Whether ``mask`` is the mask of the next token. Always True in the reasoning."""
        return self._reasoning or self._grammar.ready

    @property
    def mask(self) -> Mask:
        """Allowed next tokens ``[ceil(vocab / 32)]``. At the start, the begin tag is also allowed."""
        if self._reasoning:
            return self._unconstrained
        if self._gate.at is At.ENDED:
            return self._grammar.mask
        mask, begin = self._grammar.mask.copy(), self._gate.tokens.begin_token_id
        mask[begin // BITS] |= _bit(begin)
        return mask

    @property
    def failure(self) -> RequestFailed | None:
        """The reason why the grammar makes no more masks, or None. If this is set, the request ends, even inside its
        reasoning.
        """
        return self._grammar.failure

    @property
    def terminated(self) -> bool:
        """Whether the constraint is fulfilled and the end token was accepted."""
        return self._grammar.terminated

    def accept(self, token_id: int) -> bool:
        """Accept an output token. Only tokens after the reasoning are passed to the grammar. Returns False if the token
        is not allowed.
        """
        if self._reasoning and not allows(self._unconstrained, token_id):
            return False
        return not self._gate.passes(token_id) or self._grammar.accept(token_id)

    @property
    def forced(self) -> Sequence[int]:
        """Tokens that the grammar forces, empty during the reasoning."""
        return self._grammar.forced if self._gate.at is At.ENDED else ()

    def draft(self, token_ids: Sequence[int]) -> None:
        """Start to compute the masks after drafts. In the reasoning, all drafts up to the end tag are allowed. The
        grammar makes the mask after the end tag.
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
        """Whether the masks after the drafts are complete. Always True in the reasoning."""
        return self._gate.at is not At.ENDED or self._grammar.drafted

    @property
    def draft_masks(self) -> Sequence[Mask]:
        """Masks after one draft, after two drafts, and so on."""
        return self._grammar.draft_masks if self._gate.at is At.ENDED else self._drafts

    @property
    def prompt(self) -> bool:
        """Whether a step may wait for the mask. Always True in the reasoning."""
        return self._reasoning or self._grammar.prompt

    def wanted(self) -> bool:
        """Return whether a step may include the request. Always True in the reasoning."""
        return self._reasoning or self._grammar.wanted()

    def missed(self) -> bool:
        """Record that a step continued without the mask. Returns True if the mask is available now, which is always the
        case in the reasoning.
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
"""Number of tokens at the start of the output in which the reasoning may begin. Models write at most whitespace before
the tag.
"""


class ReasoningBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Decides when a request's reasoning must end. The decision depends only on the output, so it also works for drafts
    and resumed requests.

    Args:
        limit: Maximum number of reasoning tokens, without the tags.
        begin_token_id: Token that begins the reasoning.
        end_token_id: Token that ends the reasoning.
        begun: Whether the prompt begins the reasoning.
    """

    limit: int
    begin_token_id: int
    end_token_id: int
    begun: bool

    @classmethod
    def of(cls, request: EngineCoreRequest) -> Self | None:
        """Return the request's budget, or None if the request has no budget or the prompt ends the reasoning."""
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
        """Return the token that must follow ``output`` ``[tokens]``, or None if the budget does not force a token."""
        # If the reasoning began in the prompt, the output may repeat the tag, but only as its first token.
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
