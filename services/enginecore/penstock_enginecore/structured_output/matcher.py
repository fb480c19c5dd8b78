"""State of one request's grammar, kept by xgrammar's matcher, and measurement of the CPU time that each token takes."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import xgrammar

from penstock_enginecore.structured_output.core.base import BITS, bitmask_words


class XgrammarGrammar:
    """The state of a compiled grammar for one output. An end-of-sequence token is allowed only when the constraint is
    fulfilled.
    """

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocab_size: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._words = bitmask_words(vocab_size)
        used = vocab_size - (self._words - 1) * BITS
        self._last_word = np.uint32(2**used - 1).view(np.int32)

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Accept tokens in order, up to the first token that is not allowed. Return whether all tokens were
        accepted.
        """
        return all(not self._matcher.is_terminated() and self._matcher.accept_token(token) for token in token_ids)

    def undo(self, count: int = 1) -> None:
        """Undo the acceptance of the last ``count`` tokens."""
        if count:
            self._matcher.rollback(count)

    def forced_text(self) -> bytes:
        """Return the text that the grammar requires next, in any tokenization. The result is empty if several texts are
        possible.
        """
        return b"" if self._matcher.is_terminated() else self._matcher.find_jump_forward_string().encode()

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """Write the mask of allowed tokens into ``row``, in place. Bits beyond the vocabulary size are 0. Once the
        grammar has terminated, all bits are 0.
        """
        if self._matcher.is_terminated():
            row[:] = 0
            return
        self._matcher.fill_next_token_bitmask(row[: self._words])
        row[self._words - 1] &= self._last_word
        row[self._words :] = 0

    @property
    def terminated(self) -> bool:
        """Whether an end-of-sequence token was accepted."""
        return bool(self._matcher.is_terminated())


# The cost of an operation is the thread's CPU time in seconds. The first run may be slow for reasons other than the
# grammar: memory that is touched for the first time after a fork, cold caches, or a CPU shared with another virtual
# machine. If the first run exceeds the budget, the operation is repeated and the time of the second run is used.


def _nothing() -> None:
    """Do nothing. This function is the default of the parameter ``begins``."""


def accept_cost(
    grammar: XgrammarGrammar, token_id: int, budget: float, begins: Callable[[], None] = _nothing
) -> float | None:
    """Accept a token and return the CPU time that this took, in seconds, or None if the token is not allowed.
    ``begins`` is called before each run.
    """
    seconds = _timed(lambda: grammar.accept((token_id,)), begins)
    if seconds is not None and seconds > budget:
        grammar.undo()
        return _timed(lambda: grammar.accept((token_id,)), begins)
    return seconds


def fill_cost(
    grammar: XgrammarGrammar, row: npt.NDArray[np.int32], budget: float, begins: Callable[[], None] = _nothing
) -> float:
    """Write the mask of allowed tokens into ``row`` and return the CPU time that this took, in seconds. ``begins`` is
    called before each run.
    """

    def fill() -> bool:
        grammar.fill(row)
        return True

    seconds = _timed(fill, begins) or 0.0
    return _timed(fill, begins) or 0.0 if seconds > budget else seconds


def _timed(work: Callable[[], bool], begins: Callable[[], None]) -> float | None:
    begins()
    started = time.thread_time()
    return time.thread_time() - started if work() else None
