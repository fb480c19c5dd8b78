"""State of one request's grammar in a matcher of xgrammar, and the CPU time of its tokens."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import xgrammar

from penstock_enginecore.structured_output.core.base import BITS, bitmask_words


class XgrammarGrammar:
    """A compiled grammar with one matcher. The end token is allowed only when the constraint is fulfilled."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocab_size: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._words = bitmask_words(vocab_size)
        used = vocab_size - (self._words - 1) * BITS
        self._last_word = np.uint32(2**used - 1).view(np.int32)

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Accept tokens until a token is not allowed. Return whether all were accepted."""
        return all(not self._matcher.is_terminated() and self._matcher.accept_token(token) for token in token_ids)

    def undo(self, count: int = 1) -> None:
        """Undo the last ``count`` tokens."""
        if count:
            self._matcher.rollback(count)

    def forced_text(self) -> bytes:
        """Return the text that must come next, independent of its tokenization. Empty if several texts are possible."""
        return b"" if self._matcher.is_terminated() else self._matcher.find_jump_forward_string().encode()

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """Write the allowed tokens into ``row``, in place. Bits after the vocabulary are 0. Once the grammar has
        terminated, all bits are 0.
        """
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


# A cost is the thread's CPU time in seconds. The first run may be slow for other reasons: memory that is touched for
# the first time after a fork, cold caches, or a CPU shared with another virtual machine. If the first run is slow, the
# work is repeated and the time of the second run is used.


def _nothing() -> None:
    """Do nothing. Default of ``begins``."""


def accept_cost(
    grammar: XgrammarGrammar, token_id: int, budget: float, begins: Callable[[], None] = _nothing
) -> float | None:
    """Accept a token and return its cost, or None if the token is not allowed. ``begins`` is called before each run."""
    seconds = _timed(lambda: grammar.accept((token_id,)), begins)
    if seconds is not None and seconds > budget:
        grammar.undo()
        return _timed(lambda: grammar.accept((token_id,)), begins)
    return seconds


def fill_cost(
    grammar: XgrammarGrammar, row: npt.NDArray[np.int32], budget: float, begins: Callable[[], None] = _nothing
) -> float:
    """Write the allowed tokens into ``row`` and return the cost. ``begins`` is called before each run."""

    def fill() -> bool:
        grammar.fill(row)
        return True

    seconds = _timed(fill, begins) or 0.0
    return _timed(fill, begins) or 0.0 if seconds > budget else seconds


def _timed(work: Callable[[], bool], begins: Callable[[], None]) -> float | None:
    begins()
    started = time.thread_time()
    return time.thread_time() - started if work() else None
