"""Search for the request that makes a step fail: the state machine alone, with simulated steps."""

import math
from collections.abc import Collection
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from penstock_enginecore.core.scheduler.failure_bisection import GOOD_STEPS, StepTrial

TARGET = 8


class Steps:
    """Requests of one failed step, tried until none is a suspect any more. Each of the ``culprits`` fails all of its
    steps.
    """

    def __init__(self, keys: Collection[str], culprits: Collection[str], *, new: Collection[str] = ()) -> None:
        self.trial = StepTrial()
        self.requests = {key: SimpleNamespace(num_processed_tokens=0) for key in keys}
        self.culprits = set(culprits)
        self.blamed: list[str] = []
        self.num_failed = 0
        self.fail(keys, new)

    def fail(self, keys: Collection[str], new: Collection[str] = ()) -> None:
        self.num_failed += 1
        targets = dict.fromkeys(keys, TARGET)
        if (blamed := self.trial.failed(targets, new=new, alone=len(keys) == 1)) is not None:
            self.blamed.append(blamed)
            del self.requests[blamed]

    def run(self) -> "Steps":
        while self.trial:
            subset = list(self.trial.subset)
            if self.culprits & set(subset):
                self.fail(subset)
            else:
                for key in subset:
                    self.requests[key].num_processed_tokens = TARGET
                self.trial.step_done()
            self.trial.settle(self.requests)
        return self


@given(st.data())
def test_exactly_those_that_fail_alone_are_blamed(data: st.DataObject) -> None:
    keys = [f"r{i}" for i in range(data.draw(st.integers(2, 40)))]
    culprits = data.draw(st.sets(st.sampled_from(keys)))
    new = data.draw(st.sets(st.sampled_from(keys)))
    steps = Steps(keys, culprits, new=new).run()
    assert sorted(steps.blamed) == sorted(culprits)
    assert bool(steps.trial.num_unexplained) == (not culprits)


@given(st.integers(2, 256), st.data())
def test_one_of_many_is_found_in_about_as_many_failed_steps_as_its_logarithm(count: int, data: st.DataObject) -> None:
    keys = [f"r{i}" for i in range(count)]
    steps = Steps(keys, [data.draw(st.sampled_from(keys))]).run()
    assert steps.num_failed <= 1 + math.ceil(math.log2(count))


def test_a_newcomer_is_found_at_once() -> None:
    steps = Steps([f"r{i}" for i in range(100)], ["r70"], new=["r70"]).run()
    assert steps.num_failed == 2


def test_a_suspect_that_has_ended_is_tried_no_more() -> None:
    steps = Steps(["a", "b"], ["a"])
    del steps.requests["a"]
    steps.trial.settle(steps.requests)
    assert "a" not in steps.trial
    assert list(steps.trial.subset) == ["b"]


def test_suspects_and_others_take_turns() -> None:
    trial = Steps(["a", "b"], []).trial
    assert [trial.next_turn() for _ in range(4)] == [True, False, True, False]


def test_a_failure_without_a_culprit_counts_until_enough_steps_have_passed() -> None:
    steps = Steps(["a", "b"], []).run()
    assert steps.trial.num_unexplained == 1
    for _ in range(GOOD_STEPS):
        steps.trial.step_done()
    assert steps.trial.num_unexplained == 0


def test_a_culprit_explains_what_was_not_before() -> None:
    steps = Steps(["a", "b"], []).run()
    steps.requests = {key: SimpleNamespace(num_processed_tokens=0) for key in ("a", "b")}
    steps.culprits = {"b"}
    steps.fail(["a", "b"])
    assert steps.run().blamed == ["b"]
    assert steps.trial.num_unexplained == 0
