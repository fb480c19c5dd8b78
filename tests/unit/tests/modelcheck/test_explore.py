"""The nearest states of every network that `make model-check` explores further."""

import pytest

from tests.modelcheck.configurations import EVERY, QUICK
from tests.modelcheck.explore import Explored, explore
from tests.modelcheck.protocol import Protocol
from tests.modelcheck.world import World


@pytest.mark.parametrize("configuration", EVERY, ids=lambda configuration: configuration.name)
def test_no_invariant_breaks_in(configuration):
    found = explore(World(configuration.bounds, Protocol()), QUICK // len(EVERY) + 1)
    assert isinstance(found, Explored), "\n".join(found.lines())
    assert found.complete or found.states > QUICK // len(EVERY)
