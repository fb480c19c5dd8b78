"""Calls that several workers answer, each in its own time."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from penstock_enginecore.executor.multiproc.calls import Calls, Oldest, Overdue


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


# When workers are given up: it depends on their current call, and on whether one of them is stopped.

TIMEOUT = 30.0


class Workers:
    """The workers' current call, and the time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.call: Oldest | None = None
        self.overdue = Overdue(TIMEOUT, lambda: self.call, lambda: self.now)


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    """Yield a process that waits for input."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


@pytest.mark.parametrize(
    ("timed", "limit", "seconds", "text"),
    [
        (True, None, TIMEOUT, r"a step did not end within executor.step_timeout \(30 s\)"),
        (False, 10.0, 10.0, "did not complete a call within 10 s"),
    ],
)
def test_a_call_is_overdue_at_its_limit(
    workers: Workers, timed: bool, limit: float | None, seconds: float, text: str
) -> None:
    workers.call = Oldest(seconds - 1, timed, limit)
    assert workers.overdue.look_in() == 1
    assert workers.overdue.reason([]) is None
    workers.call = Oldest(seconds, timed, limit)
    assert workers.overdue.look_in() <= 0
    reason = workers.overdue.reason([])
    assert reason is not None
    assert re.search(text, reason)


def test_nothing_is_overdue_while_nothing_runs(workers: Workers, process: "subprocess.Popen[bytes]") -> None:
    stop(process)
    for _ in range(3):
        assert workers.overdue.reason([process.pid]) is None
        workers.now += 10 * TIMEOUT


def test_what_may_take_any_time_is_given_up_when_a_worker_is_stopped_so_long(
    workers: Workers, process: "subprocess.Popen[bytes]"
) -> None:
    workers.call = Oldest(10_000, timed=False, limit=None)
    pids = [os.getpid(), process.pid]
    assert workers.overdue.reason(pids) is None
    stop(process)
    assert workers.overdue.reason(pids) is None
    workers.now += TIMEOUT - 1
    assert workers.overdue.reason(pids) is None
    workers.now += 1
    assert workers.overdue.reason(pids) == (
        f"worker 1 (pid {process.pid}) was stopped by a signal for longer than executor.step_timeout (30 s)"
    )


def test_a_worker_that_goes_on_has_all_its_time_again(workers: Workers, process: "subprocess.Popen[bytes]") -> None:
    workers.call = Oldest(0, timed=False, limit=None)
    stop(process)
    assert workers.overdue.reason([process.pid]) is None
    process.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, process.pid, os.WCONTINUED | os.WNOWAIT)
    workers.now += TIMEOUT
    assert workers.overdue.reason([process.pid]) is None
    stop(process)
    assert workers.overdue.reason([process.pid]) is None


def test_workers_that_all_wait_while_they_should_compute_are_given_up(
    workers: Workers, process: "subprocess.Popen[bytes]"
) -> None:
    limit = 60.0  # executor.step_timeout is less
    workers.call = Oldest(0, timed=False, limit=None, computes=True)
    assert workers.overdue.reason([process.pid]) is None
    workers.now += limit
    workers.call = Oldest(limit - 1, timed=False, limit=None, computes=True)
    assert workers.overdue.reason([process.pid]) is None, "for this call they have not waited so long"
    workers.call = Oldest(limit, timed=False, limit=None, computes=False)
    assert workers.overdue.reason([process.pid]) is None, "they may wait for something else"
    workers.call = Oldest(limit, timed=False, limit=None, computes=True)
    reason = workers.overdue.reason([process.pid])
    assert reason is not None
    assert "no worker has computed anything for 60 s" in reason
    assert "executor.step_timeout" in reason


def test_workers_of_which_one_computes_are_not(workers: Workers, process: "subprocess.Popen[bytes]") -> None:
    workers.call = Oldest(10_000, timed=False, limit=None, computes=True)
    for _ in range(3):
        assert workers.overdue.reason([process.pid, os.getpid()]) is None
        computed = time.process_time()
        while time.process_time() < computed + 0.1:
            sum(range(1000))
        workers.now += 1000
