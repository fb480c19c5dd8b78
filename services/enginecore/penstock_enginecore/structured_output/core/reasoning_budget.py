"""The limit on a request's reasoning tokens."""

from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt

from penstock_common.types.request import EngineCoreRequest
from penstock_enginecore.structured_output.core.reasoning import At, ReasoningGate

_FIRST = 4
"""First output tokens among which the reasoning may begin: models write whitespace before the tag at most."""


class ReasoningBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Says when a request's reasoning must end. A pure function of the output, so it holds for drafts and resumed requests, too.

    Args:
        limit: Reasoning tokens at most, without the tags.
        begin_token_id: Token that begins the reasoning.
        end_token_id: Token that ends the reasoning.
        begun: Whether the prompt has begun the reasoning.
    """

    limit: int
    begin_token_id: int
    end_token_id: int
    begun: bool

    @classmethod
    def of(cls, request: EngineCoreRequest) -> Self | None:
        """Return the request's budget; None without one, and where the prompt has ended the reasoning."""
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
        """Return the only token that may follow ``output`` ``[tokens]``, or None if the budget forces none."""
        # Reasoning that has begun before the output may repeat its tag, but only at once.
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
