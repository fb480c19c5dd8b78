"""How far a request has got in its constraint, kept by xgrammar's matcher."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xgrammar

from penstock_enginecore.structured_output.core.base import BITS, bitmask_words


class XgrammarGrammar:
    """A ``Grammar`` over one matcher. The end token is allowed where the constraint is fulfilled, and nowhere else."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocab_size: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._words = bitmask_words(vocab_size)
        used = vocab_size - (self._words - 1) * BITS
        self._last_word = np.uint32(2**used - 1).view(np.int32)

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Take tokens in until one is not allowed."""
        return all(not self._matcher.is_terminated() and self._matcher.accept_token(token) for token in token_ids)

    def undo(self, count: int = 1) -> None:
        """Be where it was before the last ``count`` tokens."""
        if count:
            self._matcher.rollback(count)

    def forced_text(self) -> bytes:
        """What must come next, whatever its tokens are; nothing where there is a choice."""
        return b"" if self._matcher.is_terminated() else self._matcher.find_jump_forward_string().encode()

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """Write the allowed tokens into ``row``, in place. All bits are 0 behind the vocabulary, and once terminated."""
        if self._matcher.is_terminated():
            row[:] = 0
            return
        self._matcher.fill_next_token_bitmask(row[: self._words])
        row[self._words - 1] &= self._last_word
        row[self._words :] = 0

    @property
    def terminated(self) -> bool:
        """Whether the end token was accepted."""
        return bool(self._matcher.is_terminated())
