"""Choice of the running request that is preempted."""

from penstock_enginecore.core.request import Request, RequestStatus
from penstock_enginecore.core.scheduler.state import RunningRequests
from penstock_enginecore.core.scheduler.waiting_queue import rank
from tests.fakes.engines.engine_harness import make_request, prepared


def make_running(*priorities: int, by_priority: bool) -> tuple[RunningRequests, list[Request]]:
    running = RunningRequests((lambda request: rank(request, by_priority=True)) if by_priority else None)
    requests = [prepared(make_request(5, priority=priority)) for priority in priorities]
    for request in requests:
        running.add(request)
    return running, requests


def test_the_one_that_started_last_makes_room() -> None:
    running, requests = make_running(2, 0, 1, by_priority=False)
    assert running.least_urgent() is requests[2]


def test_by_priority_the_one_with_the_highest_number_makes_room() -> None:
    running, requests = make_running(2, 0, 1, by_priority=True)
    assert running.least_urgent() is requests[0]
    running.remove(requests[0])
    assert running.least_urgent() is requests[2]
    assert list(running) == requests[1:]


def test_the_order_stays_when_one_ends() -> None:
    running, requests = make_running(0, 0, 0, by_priority=False)
    requests[1].status = RequestStatus.FINISHED_STOPPED
    running.drop_finished()
    assert list(running) == [requests[0], requests[2]]
    assert running.take_all() == [requests[0], requests[2]]
    assert len(running) == 0
