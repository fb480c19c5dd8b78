"""Leases, pulls and loads keep their invariants in every order of events, and deliberate defects are found."""

import pytest

from tests.modelcheck.kv.explore import Explored, Found, explore, replay
from tests.modelcheck.kv.mutations import MUTATIONS, Mutation
from tests.modelcheck.kv.world import Bounds


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(prompts=("ab",), breaks=1, ticks=1),
        Bounds(prompts=("ab",), pressure=5, pressures=1, sleeps=1),
        Bounds(prompts=("a",), deaths=1, silences=1, aborts=1, ticks=1),
        Bounds(prompts=("ab",), give_ups=1),
        pytest.param(Bounds(prompts=("a", "a")), marks=pytest.mark.slow),
        pytest.param(Bounds(prompts=("a", "a"), room=2), marks=pytest.mark.slow),
        pytest.param(Bounds(prompts=("a", "a"), give_ups=1), marks=pytest.mark.slow),
        pytest.param(Bounds(prompts=("a", "a"), aborts=1, room=3), marks=pytest.mark.slow),
        pytest.param(Bounds(prompts=("a", "a"), pressure=4, pressures=1), marks=pytest.mark.slow),
    ],
    ids=lambda bounds: " ".join(
        name for name, value in vars(bounds).items() if value and name not in ("num_blocks", "max_leased")
    ),
)
def test_every_order_of_events_keeps_to_the_rules(bounds: Bounds) -> None:
    result = explore(bounds)
    assert isinstance(result, Explored), result
    assert result.complete


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_deliberate_defects_are_found(mutation: Mutation) -> None:
    found = explore(mutation.bounds, mutation.machines)
    assert isinstance(found, Found)
    assert found.violation.rule.split()[0] in mutation.rules, found
    assert replay(mutation.bounds, mutation.machines, found)
