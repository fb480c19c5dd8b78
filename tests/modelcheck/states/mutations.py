"""Slots of states with one rule broken each. Exploring them must find it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock_enginecore.states.core.slots import StateSlots
from penstock_enginecore.states.core.spec import StateStep, span_start
from tests.modelcheck.states.world import Bounds


@dataclass(frozen=True)
class Mutation:
    """A defect. ``rules`` are the numbers of the invariants of which one must be found broken."""

    slots: type[StateSlots]
    bounds: Bounds
    rules: Sequence[str]

    @property
    def name(self) -> str:
        """Name of the defect."""
        return self.slots.__name__


class KeepsRejectedDrafts(StateSlots):
    """Makes states findable whose tokens are only scheduled."""

    def settle(self, request: Any, num_processed_tokens: int) -> None:
        for end, slot in self._requests[request.key].shared.items():
            if slot is not self.pool.null_block and slot.block_hash is None:
                self._keep(request, slot, end)
        super().settle(request, num_processed_tokens)


class WritesTheSlotItReads(StateSlots):
    """Writes the next state over the state that the step starts from."""

    def _step(self, request: Any, start: int, count: int) -> StateStep:
        step = super()._step(request, start, count)
        return StateStep(step.rows, step.closed, [(end, step.closed or slot) for end, slot in step.writes])


class HoldsNoHit(StateSlots):
    """Reads a kept slot in place without a reference to it."""

    def admit(self, request: Any, num_computed_tokens: int, branch: int) -> bool:
        admitted = super().admit(request, num_computed_tokens, branch)
        states = self._requests.get(request.key)
        if admitted and states is not None and num_computed_tokens:
            self.pool.free([states.shared[num_computed_tokens]])
        return admitted

    def settle(self, request: Any, num_processed_tokens: int) -> None:
        states = self._requests[request.key]
        unheld = [end for end, slot in states.shared.items() if slot.block_hash is not None and not slot.ref_count]
        for end in unheld:
            self.pool.touch([states.shared[end]])
        super().settle(request, num_processed_tokens)


class KeepsASlotThatAStepOverwrites(StateSlots):
    """Keeps an ended request's slot although a step in flight writes it."""

    def free(self, request: Any, *, keep: bool) -> None:
        states = self._requests.get(request.key)
        base = span_start(request.num_processed_tokens)
        if keep and states is not None and base and base not in states.shared and base not in states.ends:
            states.ends[0] = base
        super().free(request, keep=keep)


class FreesTheStateOfTheCurrentSpan(StateSlots):
    """Frees a kept slot one span too early."""

    def settle(self, request: Any, num_processed_tokens: int) -> None:
        super().settle(request, num_processed_tokens)
        states = self._requests[request.key]
        base = span_start(num_processed_tokens)
        if base and base in states.shared:
            self.pool.free([states.shared.pop(base)])


class LosesRows(StateSlots):
    """Never reuses open rows."""

    def free(self, request: Any, *, keep: bool) -> None:
        free_rows = self._free_rows.copy()
        super().free(request, keep=keep)
        self._free_rows = free_rows


class FreesNoSharedSlots(StateSlots):
    """Keeps references to kept slots after a request's end."""

    def free(self, request: Any, *, keep: bool) -> None:
        if (states := self._requests.get(request.key)) is not None:
            states.shared.clear()
        super().free(request, keep=keep)


class FindsOtherPrefixes(StateSlots):
    """Makes a state findable one block too late in the prefix."""

    def _keep(self, request: Any, slot: Any, end: int) -> None:
        super()._keep(request, slot, min(end + 16, len(request.block_hashes) * 16))


MUTATIONS = (
    Mutation(KeepsRejectedDrafts, Bounds(("ab",), rows=1, drafts=True), ("7",)),
    Mutation(WritesTheSlotItReads, Bounds(("abc",), rows=1, interval=8), ("2", "3", "7")),
    Mutation(HoldsNoHit, Bounds(("ab", "ab", "c"), rows=2), ("1", "2", "4", "7")),
    Mutation(KeepsASlotThatAStepOverwrites, Bounds(("abcd",), rows=1, interval=8, aborts=1), ("7",)),
    Mutation(FreesTheStateOfTheCurrentSpan, Bounds(("ab",), rows=1), ("1", "2")),
    Mutation(LosesRows, Bounds(("a", "b"), rows=1), ("5",)),
    Mutation(FreesNoSharedSlots, Bounds(("ab",), rows=1, aborts=1), ("4", "6")),
    Mutation(FindsOtherPrefixes, Bounds(("ab",), rows=1), ("7",)),
)
