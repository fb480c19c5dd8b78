"""The order in which requests of one tenant wait."""

from penstock_enginecore.core.scheduler.waiting_queue import RequestQueue
from tests.fakes.engines.engine_harness import (
    make_request,
    prepared,
)


def queued(*, by_priority=False, priorities=(0, 0, 0)):
    queue = RequestQueue(by_priority=by_priority)
    requests = [prepared(make_request(n + 1, priority=p, arrival_time=9 - n)) for n, p in enumerate(priorities)]
    for arrival, request in enumerate(requests):
        request.arrival = arrival
        queue.add(request)
    return queue, requests


def drained(queue):
    order = []
    while queue:
        order.append(queue.peek())
        queue.remove(order[-1])
    return order


def test_the_queue_counts_tokens_and_removes_from_the_middle():
    queue, (a, b, c) = queued()
    assert queue.num_tokens == 6
    queue.remove(b)
    assert queue.num_tokens == 4
    assert drained(queue) == [a, c]


def test_a_request_that_comes_back_takes_its_old_place():
    queue, (a, b, c) = queued()
    queue.remove(a)
    queue.remove(b)
    queue.add(b)
    queue.add(a)
    assert drained(queue) == [a, b, c]


def test_by_priority_the_lower_number_goes_first_then_the_earlier_arrival_at_the_frontend():
    queue, (a, b, c) = queued(by_priority=True, priorities=(1, 1, 0))
    assert drained(queue) == [c, b, a]


def test_a_long_queue_forgets_what_was_removed_from_it():
    queue, _ = queued()
    for _ in range(5):
        many = [prepared(make_request(1)) for _ in range(200)]
        for request in many:
            queue.add(request)
        for request in reversed(many):
            queue.remove(request)
    assert len(queue) == 3
    assert len(queue._heap) < 100
