"""Tenants share by their weights, compared with shares recomputed from the served requests."""

import itertools
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_enginecore.core.request import Request, RequestStatus
from penstock_enginecore.core.scheduler.waiting_queue import FairQueue
from tests.fakes.engines.engine_harness import CLIENT, make_request

WEIGHTS = {"a": 1.0, "b": 3.0, "c": 0.5, "d": 1.0}
_arrivals = itertools.count()


def prepared(tenant="", tokens=1, *, weight=None, max_model_len=100_000, **fields):
    request = Request(
        make_request(
            [1] * tokens, tenant=tenant, tenant_weight=WEIGHTS.get(tenant, 1.0) if weight is None else weight, **fields
        ),
        client_id=CLIENT,
        max_model_len=max_model_len,
    )
    request.arrival = next(_arrivals)
    return request


def fair_queue(*requests, by_priority=False, fair=True):
    queue = FairQueue(by_priority=by_priority, fair=fair)
    for request in requests:
        queue.add(request)
    return queue


def take(queue):
    request = queue.peek()
    queue.take(request)
    return request


def served(queue, count):
    return [take(queue).context.tenant for _ in range(count)]


class Shares:
    """The oracle: recomputes the service that tenants received while they had requests waiting.

    Consider two tenants with requests waiting, and their service divided by their weights. The difference may change by
    no more than the largest request of each plus the largest of all, since a tenant starts within that range of the
    others.
    """

    def __init__(self):
        self.waiting = defaultdict(list)
        self.given = defaultdict(float)
        self.largest = defaultdict(float)
        self.range = {}

    def check(self):
        backlogged = {tenant for tenant, requests in self.waiting.items() if requests}
        for pair in itertools.combinations(sorted(WEIGHTS), 2):
            if not backlogged.issuperset(pair):
                self.range.pop(pair, None)
                continue
            one, other = pair
            ahead = self.given[one] - self.given[other]
            low, high = self.range.get(pair, (ahead, ahead))
            self.range[pair] = low, high = min(low, ahead), max(high, ahead)
            bound = self.largest[one] + self.largest[other] + max(self.largest.values())
            assert high - low <= bound + 1e-6, f"{pair}: {high - low} in tokens by weight, at most {bound}"

    def add(self, request):
        share = request.num_tokens / WEIGHTS[request.context.tenant]
        self.largest[request.context.tenant] = max(self.largest[request.context.tenant], share)
        self.waiting[request.context.tenant].append(request)
        self.check()

    def gone(self, request):
        self.waiting[request.context.tenant].remove(request)
        self.check()

    def start(self, request):
        assert self.waiting[request.context.tenant][0] is request, "first come, first served within a tenant"
        self.given[request.context.tenant] += request.num_tokens / WEIGHTS[request.context.tenant]
        self.gone(request)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(sorted(WEIGHTS)), st.integers(1, 7)),
        st.tuples(st.just("burst"), st.sampled_from(sorted(WEIGHTS)), st.integers(5, 60)),
        st.tuples(st.just("take"), st.integers(1, 40), st.none()),
        st.tuples(st.just("abort"), st.integers(0, 100), st.none()),
    ),
    max_size=50,
)


@settings(max_examples=100, deadline=None)
@given(OPERATIONS)
def test_tenants_that_wait_get_shares_by_their_weights(operations):
    queue, oracle = fair_queue(), Shares()
    alive = []

    def add(tenant, tokens):
        request = prepared(tenant, tokens)
        alive.append(request)
        queue.add(request)
        oracle.add(request)

    for operation, first, second in operations:
        if operation == "add":
            add(first, second)
        elif operation == "burst":
            for index in range(second):
                add(first, 1 + index % 4)
        elif operation == "take":
            for _ in range(min(first, len(alive))):
                request = take(queue)
                alive.remove(request)
                oracle.start(request)
        elif alive:
            request = alive.pop(first % len(alive))
            queue.remove(request)
            oracle.gone(request)
        assert len(queue) == len(alive)
        assert queue.num_tokens == sum(request.num_tokens for request in alive)


def test_shares_are_those_of_the_weights_in_the_long_run():
    requests = [prepared(tenant, tokens=10) for tenant in "abc" for _ in range(400)]
    order = served(fair_queue(*requests), 450)
    assert [order.count(tenant) for tenant in "abc"] == pytest.approx([100, 300, 50], abs=1)


def test_large_requests_count_for_more():
    many_small = [prepared("a", tokens=5) for _ in range(300)]
    few_large = [prepared("d", tokens=50) for _ in range(30)]
    order = served(fair_queue(*few_large, *many_small), 110)
    assert order.count("a") == pytest.approx(100, abs=10)


def test_a_light_tenant_does_not_wait_behind_a_flood():
    queue = fair_queue(*(prepared("flood", tokens=10) for _ in range(1000)))
    served(queue, 100)
    for _ in range(20):
        queue.add(prepared("light", tokens=10))
        assert "light" in served(queue, 2)


def test_a_tenant_that_returns_has_no_credit():
    queue = fair_queue(*(prepared("a", tokens=10) for _ in range(200)), prepared("d", tokens=10))
    served(queue, 100)  # tenant "d" has no requests left after one request
    for _ in range(50):
        queue.add(prepared("d", tokens=10))
    assert served(queue, 40).count("d") == pytest.approx(20, abs=1)


def test_a_tenant_that_always_asks_for_one_large_request_gets_no_more_than_its_share():
    queue = fair_queue(*(prepared("a", tokens=10) for _ in range(1000)), prepared("greedy", tokens=100))
    order = []
    for _ in range(220):
        if "greedy" not in queue._levels[0]._tenants:
            queue.add(prepared("greedy", tokens=100))
        order += served(queue, 1)
    assert order.count("greedy") == pytest.approx(20, abs=1)


def test_output_counts_when_a_request_ends():
    queue = fair_queue(*(prepared(tenant, tokens=10) for tenant in "ad" for _ in range(200)))
    order = []
    for _ in range(120):
        request = take(queue)
        order.append(request.context.tenant)
        request.all_token_ids += [0] * (90 if request.context.tenant == "a" else 0)
        queue.charge(request)
    assert order.count("d") == pytest.approx(10 * order.count("a"), rel=0.15)


def test_output_counts_for_a_tenant_with_nothing_waiting():
    queue = fair_queue(prepared("d", tokens=10), *(prepared("a", tokens=10) for _ in range(100)))
    request = take(queue)
    assert request.context.tenant == "d"
    request.all_token_ids += [0] * 90
    queue.charge(request)
    for _ in range(5):
        queue.add(prepared("d", tokens=10))
    assert served(queue, 12).index("d") == pytest.approx(10, abs=1)


def test_endless_new_requests_starve_no_other():
    queue = fair_queue(*(prepared("old", tokens=100) for _ in range(3)))
    for index in itertools.count():
        queue.add(prepared(f"newcomer {index}", tokens=10))
        if take(queue).context.tenant == "old" and queue._levels[0]._tenants["old"].queue.num_tokens == 100:
            break
        assert index < 100


def test_tenants_are_forgotten():
    queue = fair_queue(*(prepared("old", tokens=10) for _ in range(5000)))
    for index in range(2000):
        queue.add(prepared(f"passing {index}", tokens=10))
        served(queue, 2)
        assert len(queue._levels[0]) <= 3
        assert queue._levels[0].num_remembered <= 3
    while queue:
        take(queue)
    assert not queue._levels


def test_what_resumes_goes_first_whoever_it_is_of():
    queue = fair_queue(*(prepared(tenant, tokens=10) for tenant in "aab" for _ in range(5)))
    first = take(queue)
    served(queue, 3)
    first.status = RequestStatus.PREEMPTED
    queue.add(first)
    outlived = prepared("c", attempt=1)
    queue.add(outlived)
    assert {take(queue) for _ in range(2)} == {first, outlived}


def test_a_request_that_comes_back_is_not_counted_again():
    queue = fair_queue(*(prepared(tenant, tokens=10) for tenant in "ad" for _ in range(100)))
    order = []
    for _ in range(50):
        request = take(queue)
        for _ in range(3):
            request.status = RequestStatus.PREEMPTED
            queue.add(request)
            assert take(queue) is request
        order.append(request.context.tenant)
    assert order.count("a") == 25


def test_by_priority_the_number_decides_first_and_tenants_share_among_equals():
    requests = [prepared(tenant, tokens=10, priority=p) for p in (1, 0) for tenant in "ad" for _ in range(4)]
    queue = fair_queue(*requests, by_priority=True)
    order = [take(queue) for _ in range(16)]
    assert [request.context.priority for request in order] == [0] * 8 + [1] * 8
    for part in (order[:8], order[8:]):
        assert sorted(r.context.tenant for r in part[:4]) == ["a", "a", "d", "d"]


def test_the_weight_is_that_of_the_tenants_latest_request():
    queue = fair_queue(*(prepared(tenant, tokens=10) for tenant in "ad" for _ in range(100)))
    queue.add(prepared("d", tokens=10, weight=4.0))
    assert served(queue, 50).count("d") == pytest.approx(40, abs=1)


@pytest.mark.parametrize("tenants", ["a", "abcd"])
def test_one_tenant_or_fairness_off_is_the_order_of_the_policy(tenants):
    requests = [prepared(tenants[i % len(tenants)], tokens=1 + i % 7) for i in range(50)]
    queue = fair_queue(*requests, fair=len(tenants) == 1)
    assert [take(queue) for _ in requests] == requests
