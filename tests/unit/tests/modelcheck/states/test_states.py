"""Slots of states keep their invariants in every order of events, and deliberate defects are found."""

import pytest

from tests.modelcheck.states.explore import Explored, Found, explore
from tests.modelcheck.states.mutations import MUTATIONS, Mutation
from tests.modelcheck.states.world import Bounds


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(("ab",), rows=1, drafts=True, preemptions=1),
        Bounds(("ab", "a"), rows=1, drafts=True),
        Bounds(("a", "ab"), rows=2),
        Bounds(("ab", "a"), rows=1, aborts=1),
        pytest.param(Bounds(("abc",), rows=1, interval=2, losses=1, preemptions=1), marks=pytest.mark.slow),
        pytest.param(Bounds(("ab", "ab"), rows=1, aborts=1, failures=1), marks=pytest.mark.slow),
        pytest.param(Bounds(("ab", "ac"), rows=2, interval=2), marks=pytest.mark.slow),
        pytest.param(Bounds(("a", "ab"), rows=2, drafts=True), marks=pytest.mark.slow),
    ],
    ids=lambda bounds: " ".join(f"{name} {value}" for name, value in vars(bounds).items() if value),
)
def test_every_order_of_events_keeps_to_the_rules(bounds: Bounds) -> None:
    result = explore(bounds)
    assert isinstance(result, Explored), result
    assert result.complete


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_deliberate_defects_are_found(mutation: Mutation) -> None:
    found = explore(mutation.bounds, mutation.slots, limit=20_000)
    assert isinstance(found, Found)
    assert found.violation.rule.split()[0] in mutation.rules, found
