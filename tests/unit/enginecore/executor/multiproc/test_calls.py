"""Calls that several workers answer, each in its own time."""

import pytest

from penstock_enginecore.executor.multiproc.calls import Calls, Oldest


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def calls(clock: Clock) -> Calls:
    return Calls(2, clock)


def test_a_call_is_done_when_all_have_answered_and_has_the_answers_by_worker(calls: Calls) -> None:
    number, answers = calls.begin(timed=True)
    calls.answered(1, number, "one")
    assert not answers.done()
    assert calls.missing() == {0}
    calls.answered(0, number, "zero")
    assert answers.result(0) == ["zero", "one"]
    assert calls.missing() == set()


def test_the_first_error_that_came_is_raised_once_all_have_answered(calls: Calls) -> None:
    number, answers = calls.begin(timed=True)
    calls.answered(1, number, ValueError("of worker 1"))
    assert not answers.done()
    calls.answered(0, number, ValueError("of worker 0"))
    with pytest.raises(ValueError, match="of worker 1"):
        answers.result(0)


def test_what_is_no_step_fails_with_its_first_error_and_knows_who_has_not_answered(calls: Calls) -> None:
    number, answers = calls.begin(timed=False)
    calls.answered(1, number, ValueError("of worker 1"))
    with pytest.raises(ValueError, match="of worker 1"):
        answers.result(0)
    assert calls.parted
    calls.answered(0, number, "late")
    assert not calls.parted


def test_an_answer_that_comes_twice_or_to_no_call_is_ignored(calls: Calls) -> None:
    number, answers = calls.begin(timed=True)
    calls.answered(1, number, "one")
    calls.answered(1, number, "again")
    calls.answered(0, number + 1, "to nothing")
    calls.answered(0, number, "zero")
    assert answers.result(0) == ["zero", "one"]


def test_a_failure_ends_the_calls_that_wait_and_those_to_come_with_the_first_error(calls: Calls) -> None:
    first, second = calls.begin(timed=True)[1], calls.begin(timed=False)[1]
    calls.fail(ValueError("gone"))
    calls.fail(ValueError("gone again"))
    for answers in (first, second):
        with pytest.raises(ValueError, match=r"gone$"):
            answers.result(0)
    with pytest.raises(ValueError, match=r"gone$"):
        calls.begin(timed=True)
    assert str(calls.failed()) == "gone"
    assert calls.oldest() is None


def test_a_step_has_its_time_from_the_end_of_the_one_before(calls: Calls, clock: Clock) -> None:
    assert calls.oldest() is None
    first, _ = calls.begin(timed=True)
    second, _ = calls.begin(timed=True)
    clock.now += 5
    assert calls.oldest() == Oldest(5, True, None)
    for worker in (0, 1):
        calls.answered(worker, first, None)
    assert calls.oldest() == Oldest(0, True, None)
    clock.now += 2
    assert calls.oldest() == Oldest(2, True, None)
    for worker in (0, 1):
        calls.answered(worker, second, None)
    assert calls.oldest() is None


def test_what_is_no_step_may_have_a_limit_of_its_own(calls: Calls, clock: Clock) -> None:
    calls.begin(timed=False, limit=10.0)
    clock.now += 3
    assert calls.oldest() == Oldest(3, False, 10.0)
