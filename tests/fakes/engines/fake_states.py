"""Recurrent states of a fake device. Each slot holds the prefix whose state it is, so every wrong read fails at once."""

from collections.abc import Callable, Iterable

from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.states.core.spec import SPAN, ZERO_SLOT, StatePoolConfig, StateStep, span_start

_EMPTY = (0, 0)
"""Content of the zero slot: the state of no tokens."""
GARBAGE = (-1, -1)
"""Content of memory that no step or copy has written."""


class FakeStates:
    """Slots of closed states and rings of open rows, which steps read and write in order.

    A content is a number of tokens and the hash of these tokens. A row is a position and the hash of the tokens up to
    this position. Memory that no step has written, or that a failed step may have written, holds garbage.

    Args:
        config: Size of the pool.
        breaks: Returns whether the state of a request is not finite after a number of tokens.
    """

    def __init__(self, config: StatePoolConfig, breaks: Callable[[str, int], bool]) -> None:
        self.config = config
        self.num_hits = 0
        """Number of requests that began with a kept state."""
        self.broken: set[str] = set()
        """Requests whose state is not finite."""
        self._breaks = breaks
        self.clear()

    def clear(self) -> None:
        """Lose everything, as a device that sleeps. Afterwards the zero slot is zero again."""
        self._slots = {ZERO_SLOT: _EMPTY}
        self._rows: dict[tuple[int, int], tuple[int, int]] = {}

    def content(self, slot: int) -> tuple[int, int]:
        """Return the content of a slot."""
        return self._slots.get(slot, GARBAGE)

    def set_content(self, slot: int, content: tuple[int, int]) -> None:
        """Write a slot, as a copy does."""
        assert ZERO_SLOT < slot < self.config.num_slots
        self._slots[slot] = content

    def check(self, step: SchedulerOutput) -> None:
        """Check that no request of a step writes a slot that the step also reads, or that another request writes."""
        states = step.states
        assert states.keys() == step.num_scheduled_tokens.keys()
        assert len({state.rows for state in states.values()}) == len(states), "two requests share open rows"
        assert all(0 <= state.rows < self.config.num_requests for state in states.values())
        written = [slot for state in states.values() for _, slot in state.writes]
        assert len(set(written)) == len(written), "a slot is written twice in a step"
        assert all(ZERO_SLOT < slot < self.config.num_slots for slot in written)
        assert not {state.closed for state in states.values()} & set(written), "a slot is read and written in a step"
        self.num_hits += sum(new.num_computed_tokens > 0 for new in step.new_requests)

    def compute(self, key: str, state: StateStep, start: int, end: int, prefix_hash: Callable[[int], int]) -> None:
        """Read and write the states of a request's tokens ``start`` to ``end``.

        Args:
            key: The request.
            state: The slots and rows.
            start: Position of the first token.
            end: Position after the last token.
            prefix_hash: Returns the hash of the tokens up to and including a position.
        """
        base, last = span_start(start), span_start(end)
        ends = [each for each, _ in state.writes]
        assert ends == sorted(set(ends))
        assert all(base < each <= last and each % SPAN == 0 for each in ends)
        assert last == base or ends[-1] == last, f"{key}: the state at {last} is lost"
        if self._breaks(key, end):
            self.broken.add(key)
        if key in self.broken:
            self._spoil(state, start, end)
            return
        content = (base, prefix_hash(base - 1)) if base else _EMPTY
        assert (state.closed == ZERO_SLOT) == (base == 0)
        held = self._slots.get(state.closed, GARBAGE)
        assert held == content, f"{key}: slot {state.closed} holds another state than that at {base}"
        for position in range(base, start):
            row = self._rows.get(self._row(state, position), GARBAGE)
            assert row == (position, prefix_hash(position)), f"{key}: the open row of token {position} is another one"
        for each, slot in state.writes:
            self._slots[slot] = (each, prefix_hash(each - 1))
        for position in range(max(start, end - SPAN), end):
            self._rows[self._row(state, position)] = (position, prefix_hash(position))

    def spoil(self, step: SchedulerOutput) -> None:
        """Overwrite all memory that a step may have written before it failed."""
        for key, end in step.num_tokens_after.items():
            self._spoil(step.states[key], end - step.num_scheduled_tokens[key], end)

    def forget(self, keys: Iterable[str]) -> None:
        """Forget that the states of ended requests were not finite."""
        self.broken.difference_update(keys)

    def _spoil(self, state: StateStep, start: int, end: int) -> None:
        for _, slot in state.writes:
            self._slots[slot] = GARBAGE
        for position in range(max(start, end - SPAN), end):
            self._rows[self._row(state, position)] = GARBAGE

    def _row(self, state: StateStep, position: int) -> tuple[int, int]:
        return state.rows, position % self.config.rows_per_request
