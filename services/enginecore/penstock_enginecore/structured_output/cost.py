"""What a token of a constraint costs, in seconds of the thread's CPU time.

A first try may take long for reasons that are not the constraint's: memory that is touched for the first time since a fork, cold
caches, a processor shared with another guest. The same work is tried a second time then, and that one counts.
"""

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from penstock_enginecore.structured_output.grammar import XgrammarGrammar


def _nothing() -> None:
    """Nobody wants to know that a try begins."""


def accept_cost(
    grammar: XgrammarGrammar, token_id: int, budget: float, begins: Callable[[], None] = _nothing
) -> float | None:
    """Take a token in. Returns None when it is not allowed. ``begins`` is called before each try."""
    seconds = _timed(lambda: grammar.accept((token_id,)), begins)
    if seconds is not None and seconds > budget:
        grammar.undo()
        return _timed(lambda: grammar.accept((token_id,)), begins)
    return seconds


def fill_cost(
    grammar: XgrammarGrammar, row: npt.NDArray[np.int32], budget: float, begins: Callable[[], None] = _nothing
) -> float:
    """Write the allowed tokens into ``row``. ``begins`` is called before each try."""

    def fill() -> bool:
        grammar.fill(row)
        return True

    seconds = _timed(fill, begins) or 0.0
    return _timed(fill, begins) or 0.0 if seconds > budget else seconds


def _timed(work: Callable[[], bool], begins: Callable[[], None]) -> float | None:
    begins()
    started = time.thread_time()
    return time.thread_time() - started if work() else None
