"""Eight ranks, three frontends, any order of events and faults: too many states for all, so any way through them."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.modelcheck.bounds import Bounds
from tests.modelcheck.explore import come_to_rest
from tests.modelcheck.protocol import Protocol
from tests.modelcheck.world import World

BOUNDS = Bounds(
    ranks=6,
    spares=2,
    frontends=3,
    requests=(0, 1, 2, 0, 1, 2),
    steps=2,
    duplicates=2,
    losses=2,
    early_ticks=2,
    aborts=1,
    refusals=1,
    pause_calls=("keep", "resume", "wait", "resume"),
    coordinator_crashes=1,
    frontend_crashes=1,
    rank_crashes=2,
    broken_collectives=1,
    scales=(8, 5),
    failed_preparations=1,
)


class NetworkMachine(RuleBasedStateMachine):
    world = World(BOUNDS, Protocol())

    def __init__(self):
        super().__init__()
        self.state = self.world.initial()

    @rule(which=st.integers(0, 10_000))
    def something_happens(self, which):
        after = [state for _, state in self.world.successors(self.state)]
        if after:
            self.state = after[which % len(after)]

    @rule(steps=st.integers(1, 20))
    def nothing_fails_for_a_while(self, steps):
        for _ in range(steps):
            step = self.world.calm(self.state)
            if step is None:
                return
            self.state = step[1]

    @invariant()
    def it_comes_to_rest_without_further_faults(self):
        come_to_rest(self.world, self.state, set())


TestNetwork = NetworkMachine.TestCase
TestNetwork.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
