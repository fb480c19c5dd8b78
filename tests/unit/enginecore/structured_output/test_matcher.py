"""Cost of a constraint's token: if the first try takes too long, the second one counts."""

import time

import numpy as np

from penstock_enginecore.structured_output.matcher import accept_cost, fill_cost

BUDGET = 0.02


class Slow:
    """A grammar whose first ``slow`` tries take three times the budget of processor time; it allows token 1."""

    def __init__(self, slow: int) -> None:
        self.slow = slow
        self.tokens: list[int] = []
        self.tries = 0

    def accept(self, tokens: tuple[int, ...]) -> bool:
        self._work()
        if tokens != (1,):
            return False
        self.tokens += tokens
        return True

    def undo(self) -> None:
        self.tokens.pop()

    def fill(self, row: np.ndarray) -> None:
        self._work()
        row[:] = 7

    def _work(self) -> None:
        self.tries += 1
        until = time.thread_time() + 3 * BUDGET
        while self.tries <= self.slow and time.thread_time() < until:
            pass


def test_a_first_try_that_took_too_long_is_tried_again():
    grammar, begins = Slow(1), []
    cost = accept_cost(grammar, 1, BUDGET, lambda: begins.append(1))  # type: ignore[arg-type]
    assert cost is not None
    assert cost < BUDGET
    assert (grammar.tokens, grammar.tries, len(begins)) == ([1], 2, 2)

    row = np.zeros(1, np.int32)
    grammar = Slow(1)
    assert fill_cost(grammar, row, BUDGET) < BUDGET  # type: ignore[arg-type]
    assert (row[0], grammar.tries) == (7, 2)


def test_what_takes_too_long_each_time_does():
    grammar = Slow(9)
    cost = accept_cost(grammar, 1, BUDGET)  # type: ignore[arg-type]
    assert cost is not None
    assert cost > BUDGET
    assert (grammar.tokens, grammar.tries) == ([1], 2)
    assert fill_cost(grammar, np.zeros(1, np.int32), BUDGET) > BUDGET  # type: ignore[arg-type]


def test_what_is_cheap_is_tried_once_and_what_is_not_allowed_is_not_undone():
    grammar = Slow(0)
    assert accept_cost(grammar, 1, BUDGET) is not None  # type: ignore[arg-type]
    assert accept_cost(grammar, 2, BUDGET) is None  # type: ignore[arg-type]
    assert (grammar.tokens, grammar.tries) == ([1], 2)
    slow = Slow(9)
    assert accept_cost(slow, 2, BUDGET) is None  # type: ignore[arg-type]
    assert (slow.tokens, slow.tries) == ([], 1)
