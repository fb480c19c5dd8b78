"""Decodes are dealt out to the steps in flight, and prompts are not."""

import pytest

from tests.fakes.engines.engine_harness import (
    Transcript,
    add,
    assert_as_expected,
    assert_nothing_left,
    make_engine,
    make_request,
    run_to_end,
    step,
    tokens_by_step,
)
from tests.fakes.engines.fake_executor import FakeExecutor


def scheduled_by_step(executor: FakeExecutor) -> list[dict[str, int]]:
    """Tokens of each step by request id."""
    return [
        {key.partition("#")[0]: count for key, count in each.num_scheduled_tokens.items()}
        for each in executor.steps
        if each.num_scheduled_tokens
    ]


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize(("num_stages", "num_requests"), [(2, 8), (3, 7), (4, 2)])
def test_each_request_decodes_once_in_as_many_steps_as_there_are_stages(
    num_stages: int, num_requests: int, async_scheduling: bool
) -> None:
    executor = FakeExecutor(late=True)
    engine = make_engine(executor, num_stages=num_stages, async_scheduling=async_scheduling)
    requests = [make_request(2, max_tokens=20, seed=i) for i in range(num_requests)]
    transcript = run_to_end(engine, *requests)
    assert_as_expected(engine, transcript, *requests)
    assert_nothing_left(engine)
    share = -(-num_requests // num_stages)
    middle = scheduled_by_step(executor)[2 * num_stages : 6 * num_stages]
    assert all(len(each) <= share for each in middle)
    assert len(middle) == 4 * num_stages
    if share * num_stages == num_requests:
        rounds = [middle[i : i + num_stages] for i in range(len(middle) - num_stages + 1)]
        assert all(len({key for each in of_round for key in each}) == num_requests for of_round in rounds)


def test_prompts_are_not_dealt_out_and_come_behind_the_decodes() -> None:
    executor = FakeExecutor(late=True)
    engine = make_engine(executor, num_stages=2, max_num_batched_tokens=16, async_scheduling=True)
    transcript = Transcript()
    add(engine, *[make_request(2, max_tokens=12, seed=i, request_id=f"d{i}") for i in range(4)])
    for _ in range(4):
        step(engine, transcript)
    late = [make_request(30, max_tokens=2, seed=9, request_id=f"p{i}") for i in range(2)]
    transcript.prior |= {request.request_id: 0 for request in late}
    before = len(tokens_by_step(engine))
    add(engine, *late)
    for _ in range(3):
        step(engine, transcript)
    first, second = scheduled_by_step(executor)[before : before + 2]
    assert [count for key, count in first.items() if key.startswith("p")] == [14]
    assert sum(second.values()) == 16
    assert [key[0] for key in second] == ["d", "d", "p"]  # the tokens of the others are on their way
    run_to_end(engine, transcript=transcript)
    assert_as_expected(engine, transcript, *late)


def test_as_many_steps_are_in_flight_as_there_are_stages_and_one_more_where_tokens_are_not_waited_for() -> None:
    for async_scheduling, most in ((False, 3), (True, 4)):
        executor = FakeExecutor(late=True)
        engine = make_engine(executor, num_stages=3, async_scheduling=async_scheduling)
        add(engine, *[make_request(2, max_tokens=9, seed=i) for i in range(8)])
        in_flight = 0
        while engine.has_work:
            engine.step(lambda: None)
            in_flight = max(in_flight, len(engine._steps))
        # A step that is started is finished before the call ends, where there is no room for another.
        assert in_flight == most - 1
