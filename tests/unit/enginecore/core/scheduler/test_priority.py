"""The priority policy: the lower number runs first, and keeps its blocks."""

from penstock_common.types.outputs import EventType
from tests.fakes.engines.engine_harness import (
    Transcript,
    add,
    assert_as_expected,
    make_engine,
    make_request,
    run_to_end,
    step,
)


def order_of_starts(engine, *requests):
    add(engine, *requests)
    transcript = Transcript()
    started = []
    while engine.has_work:
        step(engine, transcript)
        started += [r for r in transcript.tokens if r not in started]
    return started


def test_the_lower_number_starts_first_whenever_it_came():
    engine = make_engine(policy="priority", max_num_seqs=1)
    low, high, middle = (make_request(priority=p, max_tokens=2) for p in (5, -1, 2))
    assert order_of_starts(engine, low, high, middle) == [high.request_id, middle.request_id, low.request_id]


def test_equal_numbers_start_as_they_arrived_at_the_frontend():
    engine = make_engine(policy="priority", max_num_seqs=1)
    late, early = make_request(arrival_time=2.0, max_tokens=2), make_request(arrival_time=1.0, max_tokens=2)
    assert order_of_starts(engine, late, early) == [early.request_id, late.request_id]


def test_first_come_first_served_looks_at_no_number():
    engine = make_engine(max_num_seqs=1)
    first, second = make_request(priority=9, max_tokens=2), make_request(priority=0, max_tokens=2)
    assert order_of_starts(engine, first, second) == [first.request_id, second.request_id]


def test_the_highest_number_gives_up_its_blocks_wherever_it_stands():
    # 12 usable blocks of 4 tokens; each request comes to need 7.
    engine = make_engine(policy="priority", num_blocks=13, prefix_caching=False)
    unimportant = make_request(8, priority=3, max_tokens=20, seed=1)
    important = make_request(8, priority=1, max_tokens=20, seed=2)
    transcript = run_to_end(engine, unimportant, important)
    assert_as_expected(engine, transcript, unimportant, important)
    preempted = {
        request_id: sum(event.type is EventType.PREEMPTED for o in outputs for event in o.events)
        for request_id, outputs in transcript.outputs.items()
    }
    assert preempted[unimportant.request_id] >= 1
    assert preempted[important.request_id] == 0
