"""The exploration finds every deliberate defect by the invariant that it breaks, and prints the events."""

import pytest

from tests.modelcheck.explore import Found, explore, replay
from tests.modelcheck.mutations import MUTATIONS
from tests.modelcheck.world import World


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_defect_is_found_and_its_trace_leads_to_it(mutation):
    found = explore(World(mutation.bounds, mutation.protocol), 100_000)
    assert isinstance(found, Found), "not found"
    assert found.violation.rule.split()[0] in mutation.rules, "\n".join(found.lines())
    assert replay(World(mutation.bounds, mutation.protocol), found)


def test_defects_have_different_names():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 20
