"""The scheduler's record of encoded media, compared with the workers' actual state."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_enginecore.core.model_info import MediaInfo
from penstock_enginecore.core.scheduler.output import EncoderStart, SchedulerOutput
from penstock_enginecore.media.core.encoder_scheduling import EncoderQueue
from tests.fakes.engines.fake_encoder import FakeEncoder, make_feature

BLOCKS = 4
MEDIA = (MediaInfo(modality="image", num_blocks=BLOCKS, max_embeds=100, max_tokens=100),)


def start_of(number, num_embeds):
    feature = make_feature(number, 0, num_embeds)
    return EncoderStart(identifier=feature.identifier, modality="image", num_embeds=num_embeds, data=feature.data)


def steps_until_done(queue, num_embeds):
    queue.begin_step()
    steps = 1
    done = queue.add("a", num_embeds, BLOCKS)
    while not done:
        steps += 1
        done = queue.begin_step() == ["a"]
    return steps


@pytest.mark.parametrize(
    ("budget", "num_embeds", "steps"),
    [(1, 10, 4), (10, 10, 4), (19, 10, 4), (20, 10, 2), (39, 10, 2), (40, 10, 1), (1000, 10, 1)],
)
def test_a_step_takes_as_many_blocks_as_its_budget_has_room_for_and_one_at_least(budget, num_embeds, steps):
    assert steps_until_done(EncoderQueue(budget), num_embeds) == steps


def test_what_the_first_item_leaves_is_the_next_ones():
    queue = EncoderQueue(100)
    queue.begin_step()
    assert queue.add("a", 10, BLOCKS)
    assert not queue.add("b", 20, BLOCKS)  # three encoder blocks of the item
    assert not queue.add("c", 1, BLOCKS)
    assert queue.num_pending == 21
    assert queue.begin_step() == ["b", "c"]
    assert (len(queue), queue.num_pending, queue.num_encoded) == (0, 0, 31)


def test_an_item_that_costs_too_much_is_not_passed_by_smaller_ones():
    queue = EncoderQueue(10)
    queue.begin_step()
    queue.add("large", 8, BLOCKS)
    assert not queue.add("small", 1, 1)
    assert [queue.begin_step() for _ in range(3)] == [[], [], ["large", "small"]]


def test_a_step_that_computes_nothing_says_so():
    queue = EncoderQueue(10)
    queue.begin_step()
    assert not queue.is_used
    queue.add("a", 10, 2)
    assert queue.is_used


Ops = st.lists(
    st.one_of(st.tuples(st.just("add"), st.integers(1, 9)), st.tuples(st.just("remove"), st.integers(0, 9)), st.none()),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(budget=st.integers(1, 30), ops=Ops, failing=st.sets(st.integers(0, 9)))
def test_workers_are_never_behind(budget, ops, failing):
    """Items may join, leave and fail: an item that counts as done is encoded before the forward pass."""
    queue = EncoderQueue(budget)
    failing = {start_of(number, 1).identifier for number in failing}
    worker = FakeEncoder(MEDIA, lambda identifier: 2 if identifier in failing else None)
    step = SchedulerOutput()
    known: list[str] = []
    done = set(queue.begin_step())
    for op in [*ops, None]:
        if op is None:
            step.encoder_budget = budget if queue.is_used else 0
            worker.update(step)
            assert done <= set(worker.rows)
            if not failing and not step.freed_identifiers:
                assert set(queue._items) >= set(worker.queue)
            step = SchedulerOutput()
            done |= set(queue.begin_step())
        elif op[0] == "add":
            start = start_of(len(known), op[1])
            known.append(start.identifier)
            step.encoder_starts = [*step.encoder_starts, start]
            if queue.add(start.identifier, op[1], BLOCKS):
                done.add(start.identifier)
        elif op[1] < len(known):
            identifier = known[op[1]]
            started = [start for start in step.encoder_starts if start.identifier != identifier]
            if len(started) == len(step.encoder_starts):
                step.freed_identifiers = [*step.freed_identifiers, identifier]
            step.encoder_starts = started
            queue.remove(identifier)
            done.discard(identifier)
