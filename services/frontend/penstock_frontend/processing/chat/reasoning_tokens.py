"""How many of an answer's tokens are reasoning."""

from collections.abc import Sequence

from penstock_common.types.request import ReasoningTokens


class ReasoningTokenCount:
    """Counts up to the token that ends the reasoning, itself included. ``tokens``: of the model's tags; None where these are no
    tokens: then the tokens of all pieces that have reasoning count.
    """

    def __init__(self, tokens: ReasoningTokens | None) -> None:
        self._end = tokens.end_token_id if tokens is not None else None
        self._ended = False
        self._before_end = 0
        self._in_pieces = 0
        self._reasons = False

    def push(self, token_ids: Sequence[int], *, reasoning: bool) -> None:
        """Take the tokens of a piece, and whether it has reasoning."""
        self._reasons = self._reasons or reasoning
        if reasoning:
            self._in_pieces += len(token_ids)
        for token_id in token_ids:
            if self._ended:
                return
            self._before_end += 1
            self._ended = token_id == self._end

    @property
    def total(self) -> int:
        """Tokens so far."""
        if not self._reasons:
            return 0
        return self._before_end if self._end is not None else self._in_pieces
