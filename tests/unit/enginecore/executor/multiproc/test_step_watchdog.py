"""When workers are given up: by what they are at, and whether one of them is stopped."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from penstock_enginecore.executor.multiproc.calls import Oldest
from penstock_enginecore.executor.multiproc.step_watchdog import Overdue

TIMEOUT = 30.0


class Workers:
    """What they are at, and the time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.call: Oldest | None = None
        self.overdue = Overdue(TIMEOUT, lambda: self.call, lambda: self.now)


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    """One that waits."""
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
        (False, 10.0, 10.0, "did not do within 10 s"),
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
        f"worker 1 (pid {process.pid}) is stopped, longer than executor.step_timeout (30 s)"
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
